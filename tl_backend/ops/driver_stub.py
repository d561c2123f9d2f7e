"""Linking kernels where no driver is: on a machine without the GPU that they are for."""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tl_backend.device import DeviceSpec

# TileLang links each kernel's library with the CUDA driver's, which comes with the driver, not with the toolkit.
DRIVER, SONAME = "libcuda.so", "libcuda.so.1"


@contextlib.contextmanager
def linkable_driver(device: DeviceSpec) -> Iterator[None]:
    """Where NVIDIA's driver is missing, let the linker find an empty library of its name meanwhile.

    CUDA's own images set LIBRARY_PATH to the toolkit's stub: then nothing is done, nor where no C compiler is here.
    """
    compiler = next((found for name in ("gcc", "cc", "clang") if (found := shutil.which(name))), None)
    if (
        device.vendor != "nvidia"
        or compiler is None
        or os.environ.get("LIBRARY_PATH")
        or ctypes.util.find_library("cuda")
    ):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="tl-backend-driver-") as folder:
        path = Path(folder) / DRIVER
        command = [compiler, "-shared", f"-Wl,-soname,{SONAME}", "-o", str(path), "-x", "c", os.devnull]
        subprocess.run(command, capture_output=True, check=False)  # If it fails, so will the linker, which says why.
        os.environ["LIBRARY_PATH"] = folder
        try:
            yield
        finally:
            del os.environ["LIBRARY_PATH"]
