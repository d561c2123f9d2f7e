"""The kernels of candidates, as they come out of the compile pool."""

from __future__ import annotations

import queue
from collections.abc import Iterable

from tl_backend.configs.choice import Config
from tl_backend.configs.decode import DecodeChoice
from tl_backend.device import DeviceSpec
from tl_backend.ops.compile_pool import Compiled, CompilePool
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.decode import decode_keys
from tl_backend.ops.launcher import Artifact
from tl_backend.ops.prefill import prefill_keys
from tl_backend.problem import AttentionProblem


def kernels_of(config: Config, problem: AttentionProblem, device: DeviceSpec) -> tuple[KernelKey, ...]:
    """All that launches of a config can ask for. Decodes that differ in their blocks alone share them."""
    if not isinstance(config, DecodeChoice):
        return tuple(prefill_keys(problem, config, device, splits=True))
    splits = (False, True) if device.is_gpu else (False,)  # With one multiprocessor no request is ever cut.
    return tuple(key for split in splits for key in decode_keys(problem, config.tile, device, split=split))


class Kernels:
    """What a pool has compiled so far, for all searches of a process."""

    def __init__(self, pool: CompilePool) -> None:
        self.pool = pool
        self.artifacts: dict[KernelKey, Artifact] = {}
        self.errors: dict[KernelKey, str] = {}
        self._asked: set[KernelKey] = set()

    def ask(self, keys: Iterable[KernelKey]) -> None:
        """Queue those that nobody has asked for yet."""
        new = [key for key in dict.fromkeys(keys) if key not in self._asked]
        self._asked.update(new)
        self.pool.add(new)

    def give_up_waiting(self) -> None:
        """Forget what the pool has not begun: it may be asked for again."""
        self._asked -= set(self.pool.drop_waiting())

    def wait(self, seconds: float) -> Compiled | None:
        """The next outcome, or None if there is none in time."""
        try:
            outcome = self.pool.results.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None
        if outcome.artifact is not None:
            self.artifacts[outcome.key] = outcome.artifact
        else:
            self.errors[outcome.key] = outcome.error or "no kernel"
        return outcome

    def error(self, keys: Iterable[KernelKey]) -> str | None:
        """Why one of these did not compile, or None."""
        return next((self.errors[key] for key in keys if key in self.errors), None)

    def are_there(self, keys: Iterable[KernelKey]) -> bool:
        """Whether all of these are compiled."""
        return all(key in self.artifacts for key in keys)
