"""Compiled kernels, one a ``KernelKey``, held in one place. Nothing is compiled twice.

TileLang is imported at the first compile, never before: an early import breaks AITER on ROCm.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tl_backend.cache_folder import share_with_tilelang
from tl_backend.device import DeviceSpec
from tl_backend.errors import EnvironmentProblemError, describe
from tl_backend.ops.environment import environment_problem
from tl_backend.ops.launcher import Artifact, Launcher
from tl_backend.telemetry import launches

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM formats and shows only loggers below its own.

Kernel = Callable[..., None]

# The module of ``kernels`` that has the program of each kind, a function of that name.
_MODULES = {
    "prefill": "prefill",
    "prefill_hopper": "prefill_hopper",
    "prefill_combine": "prefill_combine",
    "decode": "decode",
    "decode_combine": "decode",
    "cache_write": "cache_write",
    "merge": "merge",
}
KINDS = tuple(_MODULES)
# Not part of serving: what a device's ceilings are measured with.
CEILING_KINDS = ("gemm", "copy")
# Counts where the kernels of this process come from.
KERNELS_EVENT, COMPILED, LOADED = "kernels", "compiled at start-up", "from the kernel cache"
WHILE_SERVING = "compiled while serving"


class KernelKey(NamedTuple):
    """What a compiled kernel is held by.

    Attributes:
        kind: one of ``KINDS`` or ``CEILING_KINDS``.
        problem: what the kernel is compiled for: an AttentionProblem, for a ceiling a GemmProblem or CopyProblem.
        config: the kind's config; hashable.
        device: what it is compiled for.
    """

    kind: str
    problem: Any
    config: Any
    device: DeviceSpec


class KernelCache:
    """Maps a key to a callable. One lock: TileLang's compiler is not safe in threads; kernels compile in turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kernels: dict[KernelKey, Launcher] = {}
        self._num_compiled = 0
        self._expects_no_more = False

    def __contains__(self, key: object) -> bool:
        return key in self._kernels

    @property
    def num_compiled(self) -> int:
        """Kernels that were compiled in this process."""
        return self._num_compiled

    def expect_no_more(self) -> None:
        """From now on a compilation keeps a request waiting: it is counted, and named in the log."""
        self._expects_no_more = True

    def get(self, key: KernelKey) -> Kernel:
        """The kernel, compiled if this is the first request for it.

        Raises:
            EnvironmentProblemError: TileLang or a compiler is missing, or the compiler failed.
        """
        kernel = self._kernels.get(key)
        if kernel is None:
            with self._lock:
                kernel = self._kernels.get(key)
                if kernel is None:
                    kernel = self._kernels[key] = self._compile(key)
        return kernel

    def load(self, key: KernelKey, artifact: Artifact) -> None:
        """Take a kernel that another process has compiled: neither traces nor compiles, nor imports TileLang.

        Raises:
            EnvironmentProblemError: its library cannot be loaded here.
        """
        with self._lock:
            if key not in self._kernels:
                self._kernels[key] = Launcher.load(artifact)

    def _compile(self, key: KernelKey) -> Launcher:
        if self._expects_no_more:
            launches.record_event(KERNELS_EVENT, WHILE_SERVING)
            logger.warning("compiling %s of %s with %s while requests wait", key.kind, key.problem, key.config)
        kernel, program = _compile(key)
        self._num_compiled += 1
        return Launcher.of(kernel, program, on_gpu=key.device.is_gpu)


KERNELS = KernelCache()


def compile_library(key: KernelKey) -> Artifact:
    """Compile a kernel for another process to ``load``: nothing of it is run here, and no device is touched.

    Raises:
        EnvironmentProblemError: as ``KernelCache.get``.
    """
    with _libraries_unloaded():
        kernel, program = _compile(key)
    return Launcher.artifact_of(kernel, program, on_gpu=key.device.is_gpu)


def build_program(key: KernelKey) -> Any:
    """Trace a kernel's TileLang program (a prim_func) for any device, present or absent. Imports TileLang."""
    from tl_backend.kernels.dialect import Dialect

    module = importlib.import_module(f"tl_backend.kernels.{_MODULES.get(key.kind, key.kind)}")
    return getattr(module, key.kind)(key.problem, key.config, Dialect(key.device))


def pass_configs(kind: str) -> dict[Any, Any]:
    """TileLang's compiler switches for the kernels of a kind. Imports TileLang."""
    from tilelang import PassConfigKey

    switches = {
        # Each program checks its own bounds, once; TileLang would guard every access again.
        PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
        PassConfigKey.TL_ENABLE_FAST_MATH: True,
        # The cache write's slots differ by contract, which the checker cannot know.
        PassConfigKey.TL_DISABLE_DATA_RACE_CHECK: True,
    }
    if kind == "prefill_hopper":
        # Its warps meet at barriers of their own; one of the whole block, in the code of one role, would hang.
        switches[PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC] = True
    return switches


COMPILE_FLAGS = {"nvidia": ["-O3", "--use_fast_math", "-DNDEBUG"], "amd": ["-O3"], "cpu": ["-O3"]}


def _compile(key: KernelKey) -> tuple[Any, Any]:
    """TileLang's kernel and the program it was made of."""
    device = key.device
    if (reason := environment_problem(device)) is not None:
        raise EnvironmentProblemError(reason)
    host = {"target_host": "c"} if device.vendor == "cpu" else {}
    try:
        share_with_tilelang()
        import tilelang

        # Its start and end lines for each kernel would bury vLLM's log; ``prepare`` reports progress.
        logging.getLogger("tilelang").setLevel(logging.WARNING)
        program = build_program(key)
        kernel = tilelang.compile(
            program,
            target=device.target,
            execution_backend="cython",
            pass_configs=pass_configs(key.kind),
            compile_flags=COMPILE_FLAGS[device.vendor],
            **host,
        )
    except OSError as error:  # TileLang makes its cache folder when it is imported.
        raise EnvironmentProblemError(
            describe(
                "TileLang's cache folder",
                value=error,
                limit="it must be a folder that can be written",
                remedy="Set TILELANG_CACHE_DIR (by default in TL_BACKEND_CACHE_DIR) to one.",
            )
        ) from error
    except Exception as error:  # noqa: BLE001
        raise EnvironmentProblemError(
            describe(
                f"compiling {key.kind} for {device.name}",
                value=_summary(error),
                limit=f"{key.problem} with {key.config} must compile for {device.arch}",
                remedy="Check the compiler named there; else report this, and serve with another attention backend.",
            )
        ) from None  # TileLang's own message holds the kernel's whole source.
    return kernel, program


class _Unloaded:
    """Stands for a library where TileLang would load and initialise it, which takes memory of the device."""

    def __init__(self, path: str) -> None:
        self._name = path
        self.init = self.get_last_error = self.call = _returns_zero


def _returns_zero(*_: object) -> int:
    return 0


@contextlib.contextmanager
def _libraries_unloaded() -> Iterator[None]:
    try:
        share_with_tilelang()
        from tilelang.jit.adapter.libgen import LibraryGenerator
    except (ImportError, OSError):  # Compiling says what is wrong.
        yield
        return
    load = LibraryGenerator.load_lib

    def leave(generator: Any, lib_path: str | None = None) -> _Unloaded:
        generator.libpath = lib_path or generator.libpath
        return _Unloaded(generator.libpath)

    LibraryGenerator.load_lib = leave
    try:
        yield
    finally:
        LibraryGenerator.load_lib = load


def _summary(error: Exception) -> str:
    """The first line of a compiler's failure and the first that names an error: the rest is the kernel's source."""
    lines = [line.strip()[:300] for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines[1:] if "error" in line.lower()] or lines[1:][-1:]
    return f"{type(error).__name__}: {' / '.join(lines[:1] + errors[:1])}"
