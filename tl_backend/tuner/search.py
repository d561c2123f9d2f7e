"""The search of one problem: compile, gate and screen every candidate, then time the best of each case."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tl_backend.configs.choice import Config
from tl_backend.configs.words import format_problem
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem
from tl_backend.tuner.device_process import CandidateLostError, DeviceProcess
from tl_backend.tuner.halving import DEFAULT, MIN_ROUNDS, Measure, final, semifinal
from tl_backend.tuner.journal import Journal, config_key
from tl_backend.tuner.kernels import Kernels, kernels_of
from tl_backend.tuner.progress import Progress
from tl_backend.tuner.regimes import Case
from tl_backend.tuner.select import ranking, shared
from tl_backend.tuner.worker import Candidate

# Launches that the default takes no longer for are timed as graphs with a cold L2: the host would be a part of them.
SHORT_MS = 0.2
TICK_S = 0.5
# Of a time budget: what is left for the finals when compiling has to stop.
RESERVE = 0.2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to search. Attributes: candidates, cases: of each kind, "prefill" and "decode"; the default comes first."""

    problem: AttentionProblem
    device: DeviceSpec
    candidates: Mapping[str, tuple[Config, ...]]
    cases: Mapping[str, tuple[Case, ...]]


@dataclass(kw_only=True)
class Found:
    """What a search found for a kind.

    Attributes:
        candidates: all of them; 0 is the default.
        cases: where they are timed.
        refused: why a candidate is out, by index: it did not compile, was wrong, crashed or hung.
        screened: milliseconds by case and candidate, from a few launches.
        finals: paired samples by case; of finished cases alone.
        complete: whether every candidate was tried.
        error: why nothing could be timed, or None.
    """

    candidates: tuple[Config, ...]
    cases: tuple[Case, ...]
    refused: dict[int, str] = field(default_factory=dict)
    screened: dict[Case, dict[int, float]] = field(default_factory=dict)
    finals: dict[Case, dict[int, list[float]]] = field(default_factory=dict)
    complete: bool = False
    error: str | None = None

    def finalists(self, limit: int) -> tuple[Config, ...]:
        """The default, and the candidates that are best over all cases."""
        return tuple(self.candidates[index] for index in (DEFAULT, *ranking(self.screened, limit)))


@dataclass(kw_only=True)
class Outcome:
    """Attributes: kinds: by name; measuring_s: seconds that the device process was busy; seconds: of the search."""

    problem: AttentionProblem
    kinds: dict[str, Found]
    measuring_s: float = 0.0
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether not even the defaults could be timed."""
        return all(found.error is not None for found in self.kinds.values())


class Search:
    """One problem on one device.

    Args:
        plan: what to search.
        kernels, process, journal, progress: what it works with.
        deadline: of ``time.monotonic``, when it stops in order; None for never.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        kernels: Kernels,
        process: DeviceProcess,
        journal: Journal,
        progress: Progress,
        deadline: float | None = None,
    ) -> None:
        self._plan, self._kernels, self._process = plan, kernels, process
        self._journal, self._progress, self._deadline = journal, progress, deadline
        self._begun = time.monotonic()
        self._busy_s = 0.0
        self._found = {
            kind: Found(candidates=configs, cases=plan.cases[kind]) for kind, configs in plan.candidates.items()
        }
        self._all_cases = tuple(case for cases in plan.cases.values() for case in cases)
        self._numbers = {case: number for number, case in enumerate(self._all_cases)}
        self._short: dict[str, frozenset[int]] = {}
        self._keys = {
            (kind, index): kernels_of(kind, config, plan.problem, plan.device)
            for kind, configs in plan.candidates.items()
            for index, config in enumerate(configs)
        }

    def run(self) -> Outcome:
        """Search until all is found or the time is up.

        Raises:
            EnvironmentProblemError: nothing can run on the device.
        """
        waiting = self._recall()
        self._progress.begin(
            format_problem(self._plan.problem), total=len(self._keys), known=len(self._keys) - len(waiting)
        )
        self._kernels.ask(key for candidate in waiting for key in self._keys[candidate])
        self._process.open(self._plan.problem, self._all_cases)
        self._admit_all(waiting)
        for kind, found in self._found.items():
            found.complete = found.error is None and not any(name == kind for name, _ in waiting)
        self._settle_all()
        self._progress.end()
        return Outcome(
            problem=self._plan.problem,
            kinds=self._found,
            measuring_s=self._busy_s,
            seconds=time.monotonic() - self._begun,
        )

    def _live(self) -> list[tuple[str, Found]]:
        return [(kind, found) for kind, found in self._found.items() if found.error is None]

    # What the journal knows.

    def _recall(self) -> dict[tuple[str, int], None]:
        """Take what is known; the candidates that are not yet, the defaults first and the kinds in turns."""
        indices = {
            kind: {config_key(config): index for index, config in enumerate(found.candidates)}
            for kind, found in self._found.items()
        }
        cases = {str(case): case for case in self._all_cases}
        known: set[tuple[str, int]] = set()
        for line in self._journal.events("refused"):
            index = indices.get(line["kind"], {}).get(line["config"])
            if index is not None:
                self._found[line["kind"]].refused[index] = line["reason"]
                known.add((line["kind"], index))
        for line in self._journal.events("screened"):
            index = indices.get(line["kind"], {}).get(line["config"])
            if index is None or not set(map(str, self._plan.cases[line["kind"]])) <= line["ms"].keys():
                continue
            found = self._found[line["kind"]]
            for case in self._plan.cases[line["kind"]]:
                found.screened.setdefault(case, {})[index] = line["ms"][str(case)]
            if index == DEFAULT:
                short = {self._numbers[cases[name]] for name in line["short"] if name in cases}
                self._short[line["kind"]] = frozenset(short)
            known.add((line["kind"], index))
        for found in self._found.values():
            if DEFAULT in found.refused:
                found.error = f"the default: {found.refused[DEFAULT]}"
        waiting = sorted(self._keys.keys() - known, key=lambda candidate: (candidate[1], candidate[0] != "prefill"))
        return dict.fromkeys(waiting)

    # Compiling, gating and screening, as kernels come.

    def _admit_all(self, waiting: dict[tuple[str, int], None]) -> None:
        """Every candidate whose kernels are there; what is left in ``waiting`` was not tried."""
        while waiting:
            ready = [candidate for candidate in waiting if self._is_ready(candidate)]
            for candidate in ready:
                del waiting[candidate]
                self._admit(*candidate)
                if self._is_late(RESERVE):
                    break
            if self._is_late(RESERVE):
                self._progress.say("time is up: no more candidates")
                self._kernels.give_up_waiting()
                return
            if not ready and waiting and self._kernels.wait(TICK_S) is not None:
                self._progress.compiled()

    def _is_ready(self, candidate: tuple[str, int]) -> bool:
        kind, index = candidate
        if self._found[kind].error is not None:
            return True  # Nothing is done with it.
        if index != DEFAULT and kind not in self._short:
            return False  # The default is first: it says how a case is timed.
        keys = self._keys[candidate]
        return self._kernels.error(keys) is not None or self._kernels.are_there(keys)

    def _is_late(self, reserve: float = 0.0) -> bool:
        if self._deadline is None:
            return False
        return time.monotonic() >= self._deadline - reserve * (self._deadline - self._begun)

    def _admit(self, kind: str, index: int) -> None:
        found = self._found[kind]
        if found.error is not None:
            return
        if (error := self._kernels.error(self._keys[kind, index])) is not None:
            self._refuse(kind, index, f"does not compile: {error}")
            return
        candidate, begun = self._candidate(kind, index), time.monotonic()
        try:
            refusal = self._process.check(candidate)
            if refusal is None:
                self._screen(kind, index, candidate)
        except CandidateLostError as error:
            refusal = f"process: {error}"
        finally:
            self._busy_s += time.monotonic() - begun
        if refusal is not None:
            self._refuse(kind, index, refusal)

    def _screen(self, kind: str, index: int, candidate: Candidate) -> None:
        found, cases = self._found[kind], self._plan.cases[kind]
        best = {self._numbers[case]: min(found.screened.get(case, {}).values(), default=float("inf")) for case in cases}
        if index == DEFAULT:
            times = self._process.screen(candidate, best, frozenset())
            short = self._short[kind] = frozenset(case for case, ms in times.items() if ms <= SHORT_MS)
        else:
            short = self._short[kind]
        times = self._process.screen(candidate, best, short)
        for case in cases:
            found.screened.setdefault(case, {})[index] = times[self._numbers[case]]
        self._journal.add(
            "screened",
            kind=kind,
            config=config_key(found.candidates[index]),
            ms={str(case): times[self._numbers[case]] for case in cases},
            short=[str(case) for case in cases if self._numbers[case] in short],
        )
        self._progress.screened(found.screened)

    def _refuse(self, kind: str, index: int, reason: str) -> None:
        found = self._found[kind]
        found.refused[index] = reason
        for times in found.screened.values():
            times.pop(index, None)
        self._journal.add("refused", kind=kind, config=config_key(found.candidates[index]), reason=reason)
        self._progress.refused(kind, found.candidates[index], reason)
        if index == DEFAULT:
            found.error = f"the default: {reason}"

    def _candidate(self, kind: str, index: int) -> Candidate:
        keys = self._keys[kind, index]
        return Candidate(
            kind=kind,
            config=self._found[kind].candidates[index],
            artifacts={key: self._kernels.artifacts[key] for key in keys},
        )

    # Finals.

    def _settle_all(self) -> None:
        for kind, found in self._live():
            digest = self._digest(found)
            self._recall_finals(kind, found, digest)
            semifinals: dict[Case, dict[int, float]] = {}
            left = [case for case in self._plan.cases[kind] if case not in found.finals]
            for case in left:
                if self._is_late():
                    return
                semifinals[case] = semifinal(self._measure(kind, case), self._alive(kind, case))
                self._progress.timed()
            everywhere = shared({case: {**found.screened.get(case, {}), **semifinals.get(case, {})} for case in left})
            for case in left:
                if self._is_late() or found.error is not None:
                    return
                times = final(self._measure(kind, case), semifinals[case], everywhere - found.refused.keys())
                if times:
                    found.finals[case] = times
                    self._journal.add(
                        "final",
                        kind=kind,
                        case=str(case),
                        screened=digest,
                        ms={config_key(found.candidates[index]): samples for index, samples in times.items()},
                    )
                self._progress.timed()

    def _alive(self, kind: str, case: Case) -> dict[int, float]:
        found = self._found[kind]
        return {i: ms for i, ms in found.screened.get(case, {}).items() if i not in found.refused}

    def _digest(self, found: Found) -> str:
        """Of the candidates that stand behind a final: with others it has to be held again."""
        tried = {index for times in found.screened.values() for index in times}
        keys = sorted(config_key(found.candidates[index]) for index in tried)
        return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]

    def _recall_finals(self, kind: str, found: Found, digest: str) -> None:
        cases = {str(case): case for case in self._plan.cases[kind]}
        indices = {config_key(config): index for index, config in enumerate(found.candidates)}
        for line in self._journal.events("final"):
            if line["kind"] == kind and line["screened"] == digest and line["case"] in cases:
                found.finals[cases[line["case"]]] = {indices[name]: samples for name, samples in line["ms"].items()}

    def _measure(self, kind: str, case: Case) -> Measure:
        return functools.partial(self._rounds, kind, case)

    def _rounds(self, kind: str, case: Case, chosen: tuple[int, ...], rounds: int) -> dict[int, list[float]]:
        """Rounds of candidates that take turns; those that are lost on the way are refused, and missing here."""
        self._fetch(kind, chosen)
        chosen = tuple(index for index in chosen if index not in self._found[kind].refused)
        number = self._numbers[case]
        while chosen:
            candidates = tuple(self._candidate(kind, index) for index in chosen)
            begun = time.monotonic()
            try:
                times = self._process.rounds(candidates, number, short=number in self._short[kind], rounds=rounds)
                return dict(zip(chosen, times, strict=True))
            except CandidateLostError as error:
                culprits = self._culprits(kind, number, chosen, error)
            finally:
                self._busy_s += time.monotonic() - begun
            for index, reason in culprits.items():
                self._refuse(kind, index, f"process: {reason}")
            chosen = tuple(index for index in chosen if index not in culprits)
        return {}

    def _culprits(
        self, kind: str, case: int, chosen: tuple[int, ...], lost: CandidateLostError
    ) -> dict[int, CandidateLostError]:
        """Who took the process along: the one that it had begun with, else those that do it alone, else all."""
        if lost.candidate is not None:
            return {chosen[lost.candidate]: lost}
        suspects = [index for index in chosen if index != DEFAULT] or list(chosen)
        alone = {index: self._lost_alone(kind, case, index) for index in suspects}
        found = {index: error for index, error in alone.items() if error is not None}
        return found or dict.fromkeys(suspects, lost)

    def _lost_alone(self, kind: str, case: int, index: int) -> CandidateLostError | None:
        candidate, short = self._candidate(kind, index), case in self._short[kind]
        try:
            self._process.rounds((candidate,), case, short=short, rounds=MIN_ROUNDS)
        except CandidateLostError as error:
            return error
        return None

    def _fetch(self, kind: str, chosen: tuple[int, ...]) -> None:
        """Kernels that an earlier run has compiled: from the disk cache, where they still are."""
        wanted = [key for index in chosen for key in self._keys[kind, index]]
        self._kernels.ask(wanted)
        while not all(key in self._kernels.artifacts or key in self._kernels.errors for key in wanted):
            self._kernels.wait(TICK_S)
        for index in chosen:
            error = self._kernels.error(self._keys[kind, index])
            if error is not None and index not in self._found[kind].refused:
                self._refuse(kind, index, f"does not compile: {error}")
