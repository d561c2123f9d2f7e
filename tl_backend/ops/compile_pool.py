"""Kernels compiled side by side, in processes whose death costs one kernel."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import NamedTuple

from tl_backend.cache_folder import share_with_tilelang
from tl_backend.errors import EnvironmentProblemError, TLBackendError
from tl_backend.ops.child import Child, ChildLostError, Serve
from tl_backend.ops.compiled import KernelKey, compile_library
from tl_backend.ops.launcher import Artifact

# What one process takes at most: TileLang with nvcc's cicc and ptxas beside it.
PROCESS_BYTES = 3 << 29
# A kernel takes 5 to 9 s with nvcc alone on a core.
TIMEOUT_S = 120.0
START_S = 180.0  # Imports from a cold disk.
# Compilers take every core; whoever waits for their kernels, and measures meanwhile, goes first.
NICENESS = 5
CONTROL_GROUP = "/sys/fs/cgroup"
# Processes that die one after another before any kernel comes out: then it is not the kernels' fault.
MAX_DEATHS = 8


class Compiled(NamedTuple):
    """One outcome. Attributes: artifact: None where ``error`` says why not; seconds: taken."""

    key: KernelKey
    artifact: Artifact | None
    error: str | None
    seconds: float


def compile_kernels(connection: Connection) -> None:
    """Compile each key that comes, for other processes to load: what a process of the pool does."""
    os.nice(NICENESS)
    with contextlib.suppress(ImportError, OSError, TLBackendError):  # Compiling says what is wrong.
        share_with_tilelang()
        import tilelang  # noqa: F401
    connection.send(None)
    while True:
        key = connection.recv()
        try:
            connection.send((compile_library(key), None))
        except TLBackendError as error:
            connection.send((None, str(error)))


def num_processes(limit: int | None = None) -> int:
    """Processes to compile in: one a core, as far as there is memory."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(limit or cores, cores if limit is None else limit, _available_bytes() // PROCESS_BYTES))


def _available_bytes() -> int:
    """Memory that this process may still take, by the machine and by its control group."""
    memory = (line.split() for line in _lines("/proc/meminfo"))
    found = [int(words[1]) * 1024 for words in memory if words[0] == "MemAvailable:"]
    limit, used = _lines(f"{CONTROL_GROUP}/memory.max"), _lines(f"{CONTROL_GROUP}/memory.current")
    if limit and used and limit[0].isdigit():
        # What was read of files counts as used until somebody needs the memory: a model's weights fill it.
        parts = dict(line.split() for line in _lines(f"{CONTROL_GROUP}/memory.stat"))
        found.append(int(limit[0]) - int(used[0]) + int(parts.get("inactive_file", 0)))
    return min(found, default=1 << 40)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


@dataclass
class _Job:
    """What a process is at. Attributes: key: None while it starts."""

    child: Child
    key: KernelKey | None
    deadline: float


class CompilePool:
    """Processes that take kernels to compile, in the order given; outcomes come as they are ready.

    A kernel that kills its process, or takes longer than ``timeout_s``, is an outcome with an error. Processes stay:
    each imports TileLang once (about 3 s), not once a kernel.

    Args:
        processes: default ``num_processes()``.
        timeout_s: of a kernel.
        log: file for what compilers print.
        serve: what a process does: say None when it is ready, then answer each key with its artifact and error.

    Attributes:
        results: where each outcome is put.
    """

    def __init__(
        self,
        *,
        processes: int | None = None,
        timeout_s: float = TIMEOUT_S,
        log: Path | None = None,
        serve: Serve = compile_kernels,
    ) -> None:
        self.processes = num_processes(processes)
        self._timeout_s, self._log, self._serve = timeout_s, log, serve
        self.results: queue.Queue[Compiled] = queue.Queue()
        self._waiting: deque[KernelKey] = deque()
        self._lock = threading.Lock()
        self._wake, self._woken = Pipe()
        self._closing = False
        self._deaths, self._last_death = 0, ""  # In a row.
        self._ended: str | None = None  # Why nothing is compiled any more.
        self._thread = threading.Thread(target=self._work, name="compile pool", daemon=True)
        self._thread.start()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, keys: Iterable[KernelKey]) -> None:
        """Queue kernels."""
        with self._lock:
            self._waiting.extend(keys)
            ended = self._ended
        if ended is not None:
            self._give_up([], ended)
        elif not self._closing:
            self._wake.send(None)

    def drop_waiting(self) -> list[KernelKey]:
        """Forget what has not begun, and say which kernels those were."""
        with self._lock:
            dropped = list(self._waiting)
            self._waiting.clear()
        return dropped

    def close(self) -> None:
        """End the processes, whatever they do."""
        if not self._closing:
            self._closing = True
            self._wake.send(None)
            self._thread.join()
            self._wake.close()
            self._woken.close()

    def _work(self) -> None:
        jobs: dict[Connection, _Job] = {}
        idle: list[Child] = []
        try:
            while not self._closing:
                self._hand_out(jobs, idle)
                for ready in wait([self._woken, *jobs], _seconds_left(jobs)):
                    if ready is self._woken:
                        self._woken.recv()
                    else:
                        assert isinstance(ready, Connection)
                        self._collect(jobs.pop(ready), idle)
                now = time.monotonic()
                for connection in [c for c, job in jobs.items() if job.deadline <= now]:
                    self._collect(jobs.pop(connection), idle)
                if self._deaths >= MAX_DEATHS:
                    self._give_up([], f"{self._deaths} compiler processes died in a row, the last: {self._last_death}")
            reason = "the pool was closed"
        except Exception as error:  # noqa: BLE001 Whoever waits for an outcome must not wait for ever.
            reason = f"{type(error).__name__}: {error}"
        finally:
            for child in [*idle, *(job.child for job in jobs.values())]:
                child.kill()
        # Whoever waits for an outcome gets one.
        with self._lock:
            self._ended = reason
        self._give_up([job.key for job in jobs.values() if job.key is not None], reason)

    def _hand_out(self, jobs: dict[Connection, _Job], idle: list[Child]) -> None:
        while idle:
            with self._lock:
                if not self._waiting:
                    return
                key = self._waiting.popleft()
            child = idle.pop()
            try:
                child.send(key)
            except ChildLostError:  # It died of nothing that this kernel did.
                with self._lock:
                    self._waiting.appendleft(key)
                continue
            jobs[child.connection] = _Job(child, key, time.monotonic() + self._timeout_s)
        starting = sum(job.key is None for job in jobs.values())
        for _ in range(min(self.processes - len(jobs), len(self._waiting) - starting)):
            try:
                child = Child(self._serve, log=self._log)
            except EnvironmentProblemError as error:
                if not jobs:  # Else those at work go on with what waits.
                    self._give_up([], str(error))
                return
            jobs[child.connection] = _Job(child, None, time.monotonic() + START_S)

    def _collect(self, job: _Job, idle: list[Child]) -> None:
        begun = job.deadline - self._timeout_s
        try:
            answer = job.child.receive(0)
        except ChildLostError as lost:
            self._deaths, self._last_death = self._deaths + 1, str(lost)
            if job.key is not None:
                taken = time.monotonic() - begun
                reason = f"no kernel after {taken:.0f} s" if taken >= self._timeout_s else str(lost)
                self.results.put(Compiled(job.key, None, f"compiler process: {reason}", taken))
            return
        idle.append(job.child)
        if job.key is not None:
            self._deaths = 0
            artifact, error = answer
            self.results.put(Compiled(job.key, artifact, error, time.monotonic() - begun))

    def _give_up(self, keys: list[KernelKey], reason: str) -> None:
        with self._lock:
            keys = [*keys, *self._waiting]
            self._waiting.clear()
        for key in keys:
            self.results.put(Compiled(key, None, f"not compiled: {reason}", 0.0))
        self._deaths = 0


def _seconds_left(jobs: dict[Connection, _Job]) -> float | None:
    """Until the first deadline; None without one."""
    if not jobs:
        return None
    return max(0.0, min(job.deadline for job in jobs.values()) - time.monotonic())
