"""Whether kernels can be compiled here, told before anything is compiled and without importing TileLang."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
from pathlib import Path

from tl_backend.device import DeviceSpec, Vendor
from tl_backend.errors import describe

MIN_TILELANG = (0, 1, 12)
MIN_TILELANG_C = (0, 1, 15)  # The first whose reductions take local buffers, which the C target needs.

# For the C target TileLang takes $CXX or $CC, else the first of these that it finds.
_COMPILERS: dict[Vendor, tuple[str, ...]] = {
    "cpu": ("g++", "clang++", "c++"),
    "nvidia": ("nvcc",),
    "amd": ("hipcc",),
}
_TOOLKITS: dict[Vendor, tuple[str, ...]] = {
    "cpu": (),
    "nvidia": (os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"),
    "amd": (os.environ.get("ROCM_PATH", ""), "/opt/rocm"),
}
_REMEDIES: dict[Vendor, str] = {
    "cpu": "Install a C++ compiler (Debian: apt-get install g++), and name it alone in CXX, or unset CXX and CC.",
    "nvidia": "Install the CUDA toolkit, or set CUDA_HOME to the folder that holds bin/nvcc.",
    "amd": "Install ROCm's HIP compiler, or set ROCM_PATH to the folder that holds bin/hipcc.",
}


def environment_problem(device: DeviceSpec) -> str | None:
    """Why kernels for ``device`` cannot be compiled here, or None."""
    wanted = MIN_TILELANG_C if device.vendor == "cpu" else MIN_TILELANG
    needed = ".".join(map(str, wanted))
    remedy = f"Run pip install 'tilelang>={needed}'."
    limit = f"{needed} or newer is needed for target {device.arch}"
    if importlib.util.find_spec("tilelang") is None:
        return describe("TileLang", value="no such package", limit=limit, remedy=remedy)
    version = importlib.metadata.version("tilelang")
    if _release(version) < wanted:
        return describe("TileLang", value=version, limit=limit, remedy=remedy)
    named = [os.environ[name] for name in ("CXX", "CC") if device.vendor == "cpu" and os.environ.get(name)]
    compilers = named[:1] or list(
        _COMPILERS[device.vendor]
    )  # A named one is used, or fails: there is no second choice.
    if not any(_found(compiler, device.vendor) for compiler in compilers):
        return describe(
            "compiler",
            value=f"no {' or '.join(compilers)}",
            limit=f"TileLang needs one to compile for target {device.arch}",
            remedy=_REMEDIES[device.vendor],
        )
    return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _found(compiler: str, vendor: Vendor) -> bool:
    if shutil.which(compiler) is not None:
        return True
    return any(root and (Path(root.strip(":")) / "bin" / compiler).is_file() for root in _TOOLKITS[vendor])
