"""Calls the library that TileLang built for a kernel."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

from tl_backend.errors import EnvironmentProblemError, TLBackendError, describe

ARGUMENT_TYPES = {
    "handle": ctypes.c_void_p,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "float32": ctypes.c_float,
}


class KernelLaunchError(TLBackendError, RuntimeError):
    """The driver refused a launch."""


class Artifact(NamedTuple):
    """A compiled kernel's library: enough to launch it in another process, without TileLang.

    Attributes:
        path: of the shared library.
        types: of its arguments, as the program names them.
        on_gpu: whether the library takes a stream as its last argument.
    """

    path: str
    types: tuple[str, ...]
    on_gpu: bool


class Launcher:
    """A compiled kernel as a function of its arguments: addresses and scalars, in the program's order.

    Launches on torch's current stream of the current device. TileLang's own wrapper checks and converts every argument
    anew, which took 28 us a launch of 20 arguments beside an H200; ctypes is told the types once.

    Args:
        library: loaded, and initialised.
        artifact: what it is.
        keep: what must live as long as the library does.
    """

    def __init__(self, library: ctypes.CDLL, artifact: Artifact, keep: object = None) -> None:
        self.artifact = artifact
        self._keep = keep
        types: list[Any] = [ARGUMENT_TYPES[kind] for kind in artifact.types]
        self._call = library.call
        self._call.argtypes = [*types, ctypes.c_void_p] if artifact.on_gpu else types
        self._call.restype = ctypes.c_int
        self._last_error = library.get_last_error
        self._last_error.restype = ctypes.c_char_p
        self._on_gpu = artifact.on_gpu

    @classmethod
    def of(cls, kernel: Any, program: Any, *, on_gpu: bool) -> Launcher:
        """Of a kernel from ``tilelang.compile`` with the "cython" execution backend, and its prim_func."""
        return cls(kernel.adapter.lib, cls.artifact_of(kernel, program, on_gpu=on_gpu), keep=kernel)

    @staticmethod
    def artifact_of(kernel: Any, program: Any, *, on_gpu: bool) -> Artifact:
        """The artifact of such a kernel."""
        types = tuple(str(parameter.dtype) for parameter in program.params)
        return Artifact(kernel.adapter.lib._name, types, on_gpu)

    @classmethod
    def load(cls, artifact: Artifact) -> Launcher:
        """Of a library that another process has compiled.

        Raises:
            EnvironmentProblemError: it cannot be loaded here.
        """
        try:
            library = ctypes.CDLL(artifact.path)
            status, reason = library.init(), "its init failed"
        except (OSError, AttributeError) as error:
            status, reason = -1, str(error)
        if status != 0:
            raise EnvironmentProblemError(
                describe(
                    "kernel library", value=reason, limit=f"{artifact.path} must load here", remedy="Compile it anew."
                )
            )
        return cls(library, artifact)

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
