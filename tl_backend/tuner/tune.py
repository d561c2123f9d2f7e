"""Tunes problems, one after another: anchors whole, the others of their class with the anchors' finalists."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tl_backend.configs.choice import KINDS, Config
from tl_backend.configs.identity import DeviceIdentity, device_identity
from tl_backend.configs.regime import Regime
from tl_backend.configs.space import space
from tl_backend.configs.table import Table
from tl_backend.configs.words import format_problem
from tl_backend.device import DeviceSpec
from tl_backend.errors import InvalidInputError, describe
from tl_backend.measure.results import environment
from tl_backend.ops.checks import check_supported
from tl_backend.ops.child import Serve
from tl_backend.ops.compile_pool import TIMEOUT_S, CompilePool
from tl_backend.ops.kernel_store import source_hash
from tl_backend.problem import AttentionProblem
from tl_backend.tuner.anchors import FINALISTS, anchor_class, distinct, kinds_of, shares, transferred
from tl_backend.tuner.device_process import WATCHDOG_S, DeviceProcess
from tl_backend.tuner.entries import Entries, entries_of
from tl_backend.tuner.found import Outcome, Plan
from tl_backend.tuner.journal import Journal, journal_path
from tl_backend.tuner.kernels import Kernels
from tl_backend.tuner.progress import Progress
from tl_backend.tuner.regimes import Case, cases
from tl_backend.tuner.resume import known_finalists, known_regimes
from tl_backend.tuner.search import search
from tl_backend.tuner.state import State
from tl_backend.tuner.store import make_folder
from tl_backend.tuner.worker import begin


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to search.

    Attributes:
        kinds: of kernels.
        budget_s: seconds for everything; None for as long as it takes.
        fresh: forget what earlier searches have found.
        base: a table of this device and toolchain, as ``resume.usable`` leaves it: what it has is not searched again,
            unless ``fresh``.
        processes: that compile; None for one a core.
        compile_timeout_s, watchdog_s: after which a compiler, and the device, is taken for hung.
        serve: what the device process does.
    """

    kinds: tuple[str, ...] = KINDS
    budget_s: float | None = None
    fresh: bool = False
    base: Table | None = None
    processes: int | None = None
    compile_timeout_s: float = TIMEOUT_S
    watchdog_s: float = WATCHDOG_S
    serve: Serve = begin


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A problem that was searched. Attributes: anchor: whether its space was searched whole."""

    problem: AttentionProblem
    anchor: bool
    outcome: Outcome
    entries: Entries


@dataclass(kw_only=True)
class Result:
    """What came out.

    Attributes:
        problems: in their order; where the time was up, not all that were asked for.
        left: problems that no time was left for.
        known: problems of which the base had every entry.
        environment: GPU, driver, versions, date.
        seconds: of everything.
        starts: device processes; one more than candidates that took theirs along.
    """

    device: DeviceIdentity
    environment: dict[str, str] = field(default_factory=dict)
    problems: list[Tuned] = field(default_factory=list)
    left: list[AttentionProblem] = field(default_factory=list)
    known: list[AttentionProblem] = field(default_factory=list)
    seconds: float = 0.0
    starts: int = 0


def plan_of(
    problem: AttentionProblem,
    device: DeviceSpec,
    *,
    kinds: Iterable[str] = KINDS,
    finalists: Mapping[str, tuple[Config, ...]] | None = None,
    known: frozenset[Regime] = frozenset(),
    memory_bytes: int | None = None,
) -> Plan:
    """What a search of a problem tries.

    Args:
        finalists: of the problem's anchor; None for the whole space.
        known: regimes that need no search.
        memory_bytes: free on the device.

    Raises:
        UnsupportedError: the device does not serve the problem.
    """
    check_supported(problem, device)
    candidates: dict[str, tuple[Config, ...]] = {}
    where: dict[str, tuple[Case, ...]] = {}
    for kind in (kind for kind in kinds_of(problem) if kind in kinds):
        possible = cases(kind, problem, device, memory_bytes=memory_bytes)
        where[kind] = tuple(case for case in possible if case.regime not in known)
        if where[kind]:
            best = None if finalists is None else finalists.get(kind)
            candidates[kind] = (
                space(kind, problem, device).kept if best is None else transferred(kind, best, problem, device)
            )
    return Plan(problem=problem, device=device, candidates=candidates, cases={kind: where[kind] for kind in candidates})


def tune(
    problems: Iterable[AttentionProblem],
    device: DeviceSpec,
    folder: Path,
    progress: Progress,
    options: Options | None = None,
) -> Result:
    """Search problems on this machine's device.

    Args:
        device: it.
        folder: for journals: the user's folder of tables.

    Raises:
        UnsupportedError: the device does not serve a problem.
        InvalidInputError: another search of a problem runs, or nothing of it fits the device.
        EnvironmentProblemError: nothing can run on it, or the folder cannot be written.
    """
    options = options or Options()
    begun = time.monotonic()
    where = torch.device("cuda" if device.is_gpu else "cpu")
    result = Result(device=device_identity(device), environment=environment(where))
    waiting = list(distinct(problems))
    for problem in waiting:  # Before anything is searched for an hour.
        check_supported(problem, device)
    log = make_folder(folder / "work") / "processes.log"
    with (
        CompilePool(processes=options.processes, timeout_s=options.compile_timeout_s, log=log) as pool,
        DeviceProcess(where.type, log=log, watchdog_s=options.watchdog_s, serve=options.serve) as process,
    ):
        process.begin()
        progress.say(f"{result.device}; {pool.processes} compiler processes; messages of processes in {log}")
        session = _Session(device, folder, progress, options, Kernels(pool), process, begun, result.environment)
        finalists = known_finalists(session.base)
        while waiting and not session.is_late():
            part = shares(waiting, finalists, device, options.kinds)
            problem = waiting.pop(0)
            known = finalists.get(anchor_class(problem))
            outcome = session.search(problem, known, share=part[0] / sum(part))
            if outcome is None:
                result.known.append(problem)
                continue
            if known is None:
                finalists[anchor_class(problem)] = {
                    kind: found.finalists(FINALISTS) for kind, found in outcome.kinds.items() if found.error is None
                }
            result.problems.append(
                Tuned(
                    problem=problem,
                    anchor=known is None,
                    outcome=outcome,
                    entries=entries_of(outcome, result.environment),
                )
            )
        result.left = waiting
        result.starts = process.starts
    result.seconds = time.monotonic() - begun
    return result


class _Session:
    """What the searches of one call share."""

    def __init__(
        self,
        device: DeviceSpec,
        folder: Path,
        progress: Progress,
        options: Options,
        kernels: Kernels,
        process: DeviceProcess,
        begun: float,
        environment: Mapping[str, str],
    ) -> None:
        self._device, self._folder, self._progress, self._options = device, folder, progress, options
        self._kernels, self._process = kernels, process
        self._deadline = None if options.budget_s is None else begun + options.budget_s
        self._environment = environment
        self.base = None if options.fresh else options.base
        # Before the tensors of the first problem are made.
        self._memory_bytes = torch.cuda.mem_get_info()[0] if device.is_gpu else None

    def is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def search(
        self, problem: AttentionProblem, finalists: Mapping[str, tuple[Config, ...]] | None, *, share: float
    ) -> Outcome | None:
        """The outcome, or None where the base has every entry.

        Args:
            share: of the time that is left, which this problem may take.
        """
        options, known = self._options, known_regimes(self.base, problem)
        plan = plan_of(
            problem,
            self._device,
            kinds=options.kinds,
            finalists=finalists,
            known=known,
            memory_bytes=self._memory_bytes,
        )
        if not plan.candidates and known:
            self._progress.say(f"{format_problem(problem)}: all {len(known)} entries are there; --fresh searches again")
            return None
        if not plan.candidates:
            raise InvalidInputError(
                describe(
                    "problem",
                    value=format_problem(problem),
                    limit=f"no batch of it fits {self._device.name} in time and memory",
                    remedy="Tune it on a larger device.",
                )
            )
        identity = self._identity(problem)
        path = journal_path(self._folder, identity)
        with Journal(path, identity, fresh=options.fresh) as journal:
            state = State(
                plan,
                kernels=self._kernels,
                process=self._process,
                journal=journal,
                progress=self._progress,
                deadline=self._share_of_time(share),
            )
            return search(state)

    def _share_of_time(self, share: float) -> float | None:
        now = time.monotonic()
        return None if self._deadline is None else now + share * (self._deadline - now)

    def _identity(self, problem: AttentionProblem) -> dict[str, Any]:
        return {
            "problem": dataclasses.asdict(problem),
            "device": dataclasses.asdict(device_identity(self._device)),
            "toolchain": {name: self._environment[name] for name in ("tilelang", "torch", "cuda", "hip")},
            "kernels": source_hash()[:16],  # What was measured of other kernels means nothing.
        }
