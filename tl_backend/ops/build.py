"""Kernels that are not in the store yet, compiled side by side; what another process compiles is waited for."""

from __future__ import annotations

import contextlib
import queue
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tl_backend.cache_folder import cache_folder, share_with_tilelang
from tl_backend.errors import EnvironmentProblemError
from tl_backend.ops.compile_pool import TIMEOUT_S, Compiled, CompilePool
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.environment import environment_problem
from tl_backend.ops.kernel_store import KernelLock, KernelStore, logger
from tl_backend.ops.launcher import Artifact

Progress = Callable[[int, int, str], None]
# A kernel's library, or why there is none.
Built = Artifact | str
# How often kernels that other processes are at are asked for.
POLL_S = 0.2
# A process that holds a kernel's lock and was stopped would be waited for in vain.
PATIENCE = 1.5  # Times the time limit of a kernel.


def build_kernels(
    keys: Iterable[KernelKey],
    *,
    store: KernelStore | None = None,
    processes: int | None = None,
    timeout_s: float = TIMEOUT_S,
    on_progress: Progress | None = None,
) -> dict[KernelKey, Built]:
    """Find kernels in the store, and compile the others into it, in processes of their own.

    Any number of processes may build the same kernels at once: each kernel is compiled by one of them. This process
    compiles nothing: TileLang's compiler is not safe in threads, and may crash. No device is touched.

    Args:
        store: default: that of ``TL_BACKEND_CACHE_DIR``.
        processes: default: one a core, as far as there is memory.
        timeout_s: a kernel that takes longer is given up.
        on_progress: called with (0, total, ""), and with (done, total, kind) after each kernel that was not there;
            never where all are.

    Returns:
        The library of each kernel, or why there is none.

    Raises:
        EnvironmentProblemError: a kernel is missing, and no compiler is here or the store cannot be written.
    """
    store = store or KernelStore(cache_folder())
    keys = list(dict.fromkeys(keys))
    found: dict[KernelKey, Built] = {key: artifact for key in keys if (artifact := store.find(key))}
    missing = [key for key in keys if key not in found]
    if not missing:
        return found
    for device in {key.device for key in missing}:
        if (reason := environment_problem(device)) is not None:
            raise EnvironmentProblemError(reason)
    share_with_tilelang()  # Once, not in each process of the pool.
    if on_progress is not None:
        on_progress(0, len(missing), "")
    with CompilePool(processes=processes, timeout_s=timeout_s) as pool:
        build = _Build(store, pool, missing, PATIENCE * timeout_s)
        for done, (key, outcome) in enumerate(build, 1):
            found[key] = outcome
            if on_progress is not None:
                on_progress(done, len(missing), key.kind)
    return found


class _Build:
    """Iterates over the outcomes of kernels that are missing, as they come."""

    def __init__(self, store: KernelStore, pool: CompilePool, missing: list[KernelKey], patience_s: float) -> None:
        self._store, self._pool = store, pool
        self._waiting = deque(missing)
        self._held: dict[KernelKey, KernelLock] = {}
        self._patience_s = patience_s
        self._asked_first: dict[KernelKey, float] = {}
        self._left: set[Path] = set()  # TileLang's files, which are of no use once all is stored.

    def __iter__(self) -> Iterator[tuple[KernelKey, Built]]:
        try:
            while self._waiting or self._held:
                yield from self._hand_out()
                with contextlib.suppress(queue.Empty):
                    yield self._take(self._pool.results.get(timeout=POLL_S))
        finally:
            for lock in self._held.values():
                lock.release()
            for path in self._left:
                path.unlink(missing_ok=True)

    def _hand_out(self) -> Iterator[tuple[KernelKey, Built]]:
        """Give the pool what it has room for: the rest is left to the processes beside this one."""
        for _ in range(len(self._waiting)):
            if len(self._held) >= self._pool.processes:
                return
            key = self._waiting.popleft()
            lock = self._store.lock(key) or self._lock_of_the_stuck(key)
            if artifact := self._store.find(key):  # Of a process that was faster.
                if lock is not None:
                    lock.release()
                yield key, artifact
            elif lock is None:
                self._waiting.append(key)
            else:
                self._held[key] = lock
                self._pool.add([key])

    def _lock_of_the_stuck(self, key: KernelKey) -> KernelLock | None:
        """Go on without the lock of a process that has had it for longer than any kernel takes."""
        if time.monotonic() - self._asked_first.setdefault(key, time.monotonic()) < self._patience_s:
            return None
        logger.warning("another process has been at %s for %.0f s: compiled here, too", key.kind, self._patience_s)
        return KernelLock(None)

    def _take(self, outcome: Compiled) -> tuple[KernelKey, Built]:
        lock = self._held.pop(outcome.key)
        try:
            if outcome.artifact is None:
                return outcome.key, outcome.error or "no kernel"
            # Not removed yet: TileLang answers a second key whose program is the same with the same library.
            path = Path(outcome.artifact.path)
            if path.parent == Path(tempfile.gettempdir()):
                self._left.update(path.with_suffix(suffix) for suffix in (".so", ".cu", ".cpp"))
            return outcome.key, self._store.put(outcome.key, outcome.artifact)
        finally:
            lock.release()
