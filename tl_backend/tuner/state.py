"""What the stages of one search share: its numbering, what was found, and the device process with its clock."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator

from tl_backend.tuner.device_process import DeviceProcess
from tl_backend.tuner.found import Found, Plan
from tl_backend.tuner.halving import DEFAULT
from tl_backend.tuner.journal import Journal, config_key
from tl_backend.tuner.kernels import Kernels, kernels_of
from tl_backend.tuner.progress import Progress
from tl_backend.tuner.worker import Candidate


class State:
    """One search.

    Attributes:
        found: by kind.
        cases: of all kinds; ``numbers`` are their places here, by which the device process knows them.
        keys: kernels of each (kind, candidate).
        short: cases of each kind that are timed as graphs with a cold L2; known once the default was screened.
        busy_s: seconds that the device process has worked.
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
        self.plan, self.kernels, self.process = plan, kernels, process
        self.journal, self.progress, self._deadline = journal, progress, deadline
        self.begun = time.monotonic()
        self.busy_s = 0.0
        self.found = {
            kind: Found(candidates=configs, cases=plan.cases[kind]) for kind, configs in plan.candidates.items()
        }
        self.cases = tuple(case for kind in self.found for case in plan.cases[kind])
        self.numbers = {case: number for number, case in enumerate(self.cases)}
        self.short: dict[str, frozenset[int]] = {}
        self.keys = {
            (kind, index): kernels_of(config, plan.problem, plan.device)
            for kind, configs in plan.candidates.items()
            for index, config in enumerate(configs)
        }

    def live(self) -> list[tuple[str, Found]]:
        """The kinds whose default works."""
        return [(kind, found) for kind, found in self.found.items() if found.error is None]

    def is_late(self, reserve: float = 0.0) -> bool:
        """Whether the time is up, but for this part of it."""
        if self._deadline is None:
            return False
        return time.monotonic() >= self._deadline - reserve * (self._deadline - self.begun)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Counts the time of a request to the device process."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.busy_s += time.monotonic() - begun

    def candidate(self, kind: str, index: int) -> Candidate:
        """A candidate whose kernels are there."""
        artifacts = {key: self.kernels.artifacts[key] for key in self.keys[kind, index]}
        return Candidate(kind=kind, config=self.found[kind].candidates[index], artifacts=artifacts)

    def refuse(self, kind: str, index: int, reason: str) -> None:
        """Put a candidate out, for ever.

        The default for this search alone: nothing is found without it, and what broke it (a compiler that is missing, a
        full disk) may be mended when the search is called for again.
        """
        if index != DEFAULT:
            self.journal.add("refused", kind=kind, config=config_key(self.found[kind].candidates[index]), reason=reason)
        self.progress.refused(kind, self.found[kind].candidates[index], reason)
        self.note_refusal(kind, index, reason)

    def note_refusal(self, kind: str, index: int, reason: str) -> None:
        """As ``refuse``, of one that the journal has."""
        found = self.found[kind]
        found.refused[index] = reason
        for times in found.screened.values():
            times.pop(index, None)
        if index == DEFAULT:
            found.error = f"the default: {reason}"

    def digest(self, kind: str) -> str:
        """Of the candidates that stand behind a final: with others it has to be held again."""
        found = self.found[kind]
        tried = {index for times in found.screened.values() for index in times}
        keys = sorted(config_key(found.candidates[index]) for index in tried)
        return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]
