"""Calls the library that TileLang built for a kernel."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from tl_backend.errors import TLBackendError

_CTYPES = {
    "handle": ctypes.c_void_p,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "float32": ctypes.c_float,
}


class KernelLaunchError(TLBackendError, RuntimeError):
    """The driver refused a launch."""


class Launcher:
    """A compiled kernel as a function of its arguments: addresses and scalars, in the program's order.

    Launches on torch's current stream of the current device. TileLang's own wrapper checks and converts every argument
    anew, which took 28 us a launch of 20 arguments beside an H200; ctypes is told the types once.

    Args:
        kernel: from ``tilelang.compile`` with the "cython" execution backend.
        program: the prim_func that it was compiled from.
        on_gpu: whether the library takes a stream as its last argument.
    """

    def __init__(self, kernel: Any, program: Any, *, on_gpu: bool) -> None:
        self._kernel = kernel  # Keeps the library loaded.
        library = kernel.adapter.lib
        types = [_CTYPES[str(parameter.dtype)] for parameter in program.params]
        self._call = library.call
        self._call.argtypes = [*types, ctypes.c_void_p] if on_gpu else types
        self._call.restype = ctypes.c_int
        self._last_error = library.get_last_error
        self._last_error.restype = ctypes.c_char_p
        self._on_gpu = on_gpu

    def __call__(self, *arguments: float) -> None:
        """Launch.

        Raises:
            KernelLaunchError: the driver refused it.
        """
        if self._on_gpu:
            status = self._call(*arguments, torch.cuda.current_stream().cuda_stream)
        else:
            status = self._call(*arguments)
        if status != 0:
            raise KernelLaunchError((self._last_error() or b"no message").decode(errors="replace"))
