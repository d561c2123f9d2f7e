"""Compiled kernels, one a ``KernelKey``, held in one place. Nothing is compiled twice.

TileLang is imported at the first compile, never before: an early import breaks AITER on ROCm.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from tl_backend.device import DeviceSpec
from tl_backend.errors import EnvironmentProblemError, describe
from tl_backend.ops.environment import environment_problem
from tl_backend.ops.launcher import Launcher
from tl_backend.problem import AttentionProblem

Kernel = Callable[..., None]

KINDS = ("prefill", "decode", "decode_combine", "cache_write")


class KernelKey(NamedTuple):
    """What a compiled kernel is held by.

    Attributes:
        kind: one of ``KINDS``.
        problem: what the kernel is compiled for.
        config: the kind's config; hashable.
        device: what it is compiled for.
    """

    kind: str
    problem: AttentionProblem
    config: Any
    device: DeviceSpec


class KernelCache:
    """Maps a key to a callable. Thread-safe; different kernels may compile side by side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[KernelKey, _Slot] = {}

    @property
    def num_compiled(self) -> int:
        """Kernels that this cache has compiled."""
        with self._lock:
            return sum(slot.kernel is not None for slot in self._slots.values())

    def get(self, key: KernelKey) -> Kernel:
        """The kernel, compiled if this is the first request for it.

        Raises:
            EnvironmentProblemError: TileLang or a compiler is missing, or the compiler failed.
        """
        slot = self._slots.get(key)
        if slot is None:
            with self._lock:
                slot = self._slots.setdefault(key, _Slot())
        if slot.kernel is None:
            with slot.lock:
                if slot.kernel is None:
                    slot.kernel = _compile(key)
        return slot.kernel


class _Slot:
    """A kernel, or the place where it will be, with the lock of its compilation."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kernel: Kernel | None = None


KERNELS = KernelCache()


def build_program(key: KernelKey) -> Any:
    """Trace a kernel's TileLang program (a prim_func) for any device, present or absent. Imports TileLang."""
    from tl_backend.kernels.cache_write import cache_write
    from tl_backend.kernels.decode import decode, decode_combine
    from tl_backend.kernels.dialect import Dialect
    from tl_backend.kernels.prefill import prefill

    programs: dict[str, Callable[..., Any]] = {
        "prefill": prefill,
        "decode": decode,
        "decode_combine": decode_combine,
        "cache_write": cache_write,
    }
    return programs[key.kind](key.problem, key.config, Dialect(key.device))


def pass_configs() -> dict[Any, Any]:
    """TileLang's compiler switches for these kernels. Imports TileLang."""
    from tilelang import PassConfigKey

    return {
        # Each program checks its own bounds, once; TileLang would guard every access again.
        PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
        PassConfigKey.TL_ENABLE_FAST_MATH: True,
        # The cache write's slots differ by contract, which the checker cannot know.
        PassConfigKey.TL_DISABLE_DATA_RACE_CHECK: True,
    }


_COMPILE_FLAGS = {"nvidia": ["-O3", "--use_fast_math", "-DNDEBUG"], "amd": ["-O3"], "cpu": ["-O3"]}


def _compile(key: KernelKey) -> Kernel:
    device = key.device
    if (reason := environment_problem(device)) is not None:
        raise EnvironmentProblemError(reason)
    import tilelang

    # Its start and end lines for each kernel would bury vLLM's log; ``prepare`` reports progress.
    logging.getLogger("tilelang").setLevel(logging.WARNING)
    program = build_program(key)
    host = {"target_host": "c"} if device.vendor == "cpu" else {}
    try:
        kernel = tilelang.compile(
            program,
            target=device.target,
            execution_backend="cython",
            pass_configs=pass_configs(),
            compile_flags=_COMPILE_FLAGS[device.vendor],
            **host,
        )
    except Exception as error:
        raise EnvironmentProblemError(
            describe(
                f"compiling {key.kind} for {device.name}",
                value=f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:300] if str(error) else ''}",
                limit=f"{key.problem} with {key.config} must compile for {device.arch}",
                remedy="Report this with the message above; another attention backend serves meanwhile.",
            )
        ) from error
    return Launcher(kernel, program, on_gpu=device.is_gpu)
