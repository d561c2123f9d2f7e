"""The process that owns the device: it gates and times what its parent asks for, and dies with a bad candidate.

After any error of the device its context may be lost: the process says what happened and ends. Kernels come as
libraries that other processes have compiled: tracing a program again, to find it in TileLang's cache, takes 0.4 s.
"""

from __future__ import annotations

import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from tl_backend.configs.choice import Config, FixedChooser
from tl_backend.configs.decode import DecodeChoice
from tl_backend.device import DeviceSpec
from tl_backend.errors import EnvironmentProblemError
from tl_backend.measure.timing import Launch, as_graph, time_ms
from tl_backend.measure.workload import Workload
from tl_backend.ops.compiled import KERNELS, KernelKey
from tl_backend.ops.launcher import Artifact
from tl_backend.problem import AttentionProblem
from tl_backend.tuner.batches import CacheBatch, num_pages, random_cache
from tl_backend.tuner.gate import Gate
from tl_backend.tuner.regimes import Case

Artifacts = dict[KernelKey, Artifact]
# Of a launch that takes longer than this, one sample says whether it can win; a shorter one is launched twice more.
LONG_MS = 0.4
MORE_SAMPLES = 2
# A first launch this many times slower than the best so far is not launched again.
HOPELESS = 2.0


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A config with its kernels."""

    kind: str
    config: Config
    artifacts: Artifacts


@dataclass(frozen=True, kw_only=True)
class Open:
    """Make the tensors of a problem and its cases."""

    problem: AttentionProblem
    cases: tuple[Case, ...]


@dataclass(frozen=True, kw_only=True)
class Check:
    """Pass a candidate through the gate. The answer is its refusal, or None."""

    candidate: Candidate


@dataclass(frozen=True, kw_only=True)
class Screen:
    """A few launches of one candidate in each case; the answer is milliseconds by case.

    Attributes:
        cases: by index, with the best milliseconds so far.
        short: cases timed as graphs with a cold L2.
    """

    candidate: Candidate
    cases: dict[int, float]
    short: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Launches of candidates that take turns in one case; the answer is a list of milliseconds each.

    Before a candidate's first launch the process says which it is: its index comes as an ``At``.
    """

    candidates: tuple[Candidate, ...]
    case: int
    short: bool
    rounds: int


@dataclass(frozen=True, kw_only=True)
class At:
    """Not an answer yet: the candidate of a ``Rounds`` that is launched next, or None once all have run."""

    candidate: int | None


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The candidate broke something; the process ends."""

    reason: str


def serve(connection: Connection, device: torch.device) -> None:
    """Answer requests until the pipe ends or the device fails."""
    session = Session(device, connection.send)
    handlers: dict[type, Callable[[Any], Any]] = {
        Open: session.open,
        Check: session.check,
        Screen: session.screen,
        Rounds: session.rounds,
    }
    connection.send(None)  # Ready.
    while True:
        request = connection.recv()
        try:
            answer = handlers[type(request)](request)
            session.synchronize()
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            connection.send(Failed(reason=f"{type(error).__name__}: {_first_line(error)}"))
            sys.exit(1)
        connection.send(answer)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")[:300]


class Session:
    """The tensors of the problem at hand, and what runs on them."""

    def __init__(self, device: torch.device, say: Callable[[At], None]) -> None:
        self._device, self._spec, self._say = device, DeviceSpec.of(device), say
        self._gates: dict[str, Gate] = {}
        self._batches: dict[int, CacheBatch] = {}
        self._ready: dict[tuple[int, bool, Config], Launch] = {}  # Of one case.

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def open(self, request: Open) -> None:
        self._gates, self._batches, self._ready = {}, {}, {}
        self._problem, self._cases = request.problem, request.cases
        torch.manual_seed(0)
        blocks = max((num_pages(self._workload(case)) for case in request.cases), default=0)
        self._cache = random_cache(request.problem, max(blocks, 1), self._device)

    def check(self, request: Check) -> str | None:
        kind = request.candidate.kind
        if kind not in self._gates:
            self._gates[kind] = Gate(kind, self._problem, self._device)
        return self._gates[kind].refusal(self._chooser(request.candidate))

    def screen(self, request: Screen) -> dict[int, float]:
        found = {}
        for index, best in request.cases.items():
            short = index in request.short
            launch = self._prepared(index, request.candidate, short)
            self._ready.clear()
            launch()  # As a graph it has run before; else it loads its code now.
            samples = self._times({"": launch}, 1, short)[""]
            if samples[0] <= min(LONG_MS, HOPELESS * best):
                samples += self._times({"": launch}, MORE_SAMPLES, short)[""]
            found[index] = statistics.median(samples)
        return found

    def rounds(self, request: Rounds) -> list[list[float]]:
        launches = {}
        for number, candidate in enumerate(request.candidates):
            self._say(At(candidate=number))
            launch = launches[str(number)] = self._prepared(request.case, candidate, request.short)
            launch()
            self.synchronize()
        self._say(At(candidate=None))
        times = self._times(launches, request.rounds, request.short)
        return [times[name] for name in launches]

    def _times(self, launches: dict[str, Launch], rounds: int, short: bool) -> dict[str, list[float]]:
        return time_ms(launches, self._device, rounds=rounds, warmup=0, cold=short)

    def _prepared(self, index: int, candidate: Candidate, short: bool) -> Launch:
        key = (index, short, candidate.config)
        if key not in self._ready:
            if any(held[0] != index for held in self._ready):
                self._ready.clear()
            launch, _ = self._batch(index).tilelang(self._chooser(candidate))
            self._ready[key] = as_graph(launch, self._device) if short else launch
        return self._ready[key]

    def _batch(self, index: int) -> CacheBatch:
        if index not in self._batches:
            self._batches[index] = CacheBatch(self._workload(self._cases[index]), self._cache)
        return self._batches[index]

    def _workload(self, case: Case) -> Workload:
        return Workload(
            name=str(case),
            problem=self._problem,
            query_lens=(case.query_len,) * case.num_requests,
            seq_lens=(case.seq_len,) * case.num_requests,
        )

    def _chooser(self, candidate: Candidate) -> FixedChooser:
        for key, artifact in candidate.artifacts.items():
            _load(key, artifact)
        config = candidate.config
        return FixedChooser(
            self._problem,
            self._spec,
            prefill=None if isinstance(config, DecodeChoice) else config,
            decode=config if isinstance(config, DecodeChoice) else None,
            source="tuner",
        )


def _load(key: KernelKey, artifact: Artifact) -> None:
    try:
        KERNELS.load(key, artifact)
    except EnvironmentProblemError as error:  # Somebody has tidied up /tmp: the disk cache has it, too.
        print(f"device process: {error}", flush=True)  # noqa: T201
        KERNELS.get(key)


def begin(connection: Connection) -> None:
    """A process's entry: the device's type comes first."""
    name = connection.recv()
    begun = time.monotonic()
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.init()
    print(f"device process: {name} ready in {time.monotonic() - begun:.1f} s", flush=True)  # noqa: T201
    serve(connection, device)
