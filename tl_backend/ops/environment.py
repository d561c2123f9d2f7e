"""Whether kernels can be compiled here, told before anything is compiled and without importing TileLang."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
from pathlib import Path

from tl_backend.cache_folder import cache_folder
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
# A variable that is set decides alone where CUDA is, even if nothing is there; for ROCm the search goes on.
_CUDA_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
_ROCM_VARIABLE = "ROCM_PATH"
_CUDA_WHEEL = "nvidia-cuda-nvcc"  # Those of CUDA 12 are called otherwise, and hold no nvcc.
_DEFAULT_HOMES: dict[Vendor, str] = {"nvidia": "/usr/local/cuda", "amd": "/opt/rocm"}
_REMEDIES: dict[Vendor, str] = {
    "cpu": "Install a C++ compiler (Debian: apt-get install g++), and name it alone in CXX, or unset CXX and CC.",
    "nvidia": "Install the CUDA toolkit, or set CUDA_HOME to the folder that holds bin/nvcc.",
    "amd": "Install ROCm's HIP compiler, or set ROCM_PATH to the folder that holds bin/hipcc.",
}


def environment_problem(device: DeviceSpec) -> str | None:
    """Why kernels for ``device`` cannot be compiled here, or None."""
    if (reason := tilelang_problem(device)) is not None:
        return reason
    return None if find_compiler(device.vendor) else compiler_problem(device)


def start_problem(device: DeviceSpec) -> str | None:
    """Why a server cannot start here, or None. Kernels that were built before need no compiler."""
    if (reason := tilelang_problem(device)) is not None:
        return reason
    is_empty = next(cache_folder().glob("*.json"), None) is None
    return compiler_problem(device) if find_compiler(device.vendor) is None and is_empty else None


def tilelang_problem(device: DeviceSpec) -> str | None:
    """Why the installed TileLang does not serve a device, or None."""
    wanted = MIN_TILELANG_C if device.vendor == "cpu" else MIN_TILELANG
    needed = ".".join(map(str, wanted))
    remedy = f"Run pip install 'tilelang>={needed}'."
    limit = f"{needed} or newer is needed for target {device.arch}"
    if importlib.util.find_spec("tilelang") is None:
        return describe("TileLang", value="no such package", limit=limit, remedy=remedy)
    version = importlib.metadata.version("tilelang")
    if _release(version) < wanted:
        return describe("TileLang", value=version, limit=limit, remedy=remedy)
    return None


def compiler_problem(device: DeviceSpec) -> str:
    """What to say where there is no compiler for a device."""
    home = _cuda_variable() if device.vendor == "nvidia" else None
    if home is not None:
        return describe(
            home,
            value=repr(os.environ[home]),
            limit="TileLang looks for bin/nvcc in that folder and nowhere else",
            remedy=f"Set {home} to the folder that holds bin/nvcc, or unset it.",
        )
    return describe(
        "compiler",
        value=f"no {' or '.join(_names(device.vendor))}",
        limit=f"TileLang needs one to compile for target {device.arch}",
        remedy=_REMEDIES[device.vendor],
    )


def find_compiler(vendor: Vendor) -> Path | None:
    """The compiler that TileLang would take for a vendor's devices, by its own search."""
    name = _names(vendor)[0]
    if vendor == "nvidia" and (variable := _cuda_variable()) is not None:
        return _file(Path(os.environ[variable]) / "bin" / name)
    if vendor == "amd" and (root := os.environ.get(_ROCM_VARIABLE)) and (found := _file(Path(root) / "bin" / name)):
        return found
    for candidate in _names(vendor):
        if (path := shutil.which(candidate)) is not None:
            return Path(path)
    if vendor == "nvidia" and (wheel := _in_wheel(name)) is not None:
        return wheel
    home = _DEFAULT_HOMES.get(vendor)
    return _file(Path(home) / "bin" / name) if home else None


def _names(vendor: Vendor) -> tuple[str, ...]:
    """Programs that will do. One that CXX or CC names is used, or fails: there is no second choice."""
    named = [os.environ[name] for name in ("CXX", "CC") if vendor == "cpu" and os.environ.get(name)]
    return tuple(named[:1]) or _COMPILERS[vendor]


def _cuda_variable() -> str | None:
    return next((name for name in _CUDA_VARIABLES if os.environ.get(name)), None)


def _in_wheel(name: str) -> Path | None:
    try:
        files = importlib.metadata.files(_CUDA_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((_file(Path(str(file.locate()))) for file in files if file.name == name), None)


def _file(path: Path) -> Path | None:
    return path if path.is_file() else None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
