"""The parent's end of the process that owns the device: it starts another after a crash or a hang, and says whose."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from tl_backend.errors import EnvironmentProblemError, TLBackendError, describe
from tl_backend.ops.child import Child, ChildLostError, Serve
from tl_backend.problem import AttentionProblem
from tl_backend.tuner.regimes import Case
from tl_backend.tuner.worker import At, Candidate, Check, Failed, Open, Rounds, Screen, begin

START_S = 180.0  # Importing torch from a cold disk, and a context on each GPU of a large node.
OPEN_S = 120.0  # Gibibytes of random numbers; on a CPU at 0.1 GiB/s.
# Of one request. The longest legal launch takes 0.5 s, on a CPU; a hang takes for ever.
WATCHDOG_S = 30.0


class CandidateLostError(TLBackendError, RuntimeError):
    """The process died or failed. Attributes: candidate: whose launch it was, by index; None if it is not known."""

    def __init__(self, reason: str, candidate: int | None) -> None:
        super().__init__(reason)
        self.candidate = candidate


class DeviceProcess:
    """One process at a time; the next request after a loss starts another.

    Args:
        device: "cuda" or "cpu".
        log: file for what it prints.
        watchdog_s: seconds for an answer.
        serve: what it does.

    Attributes:
        starts: processes so far.
    """

    def __init__(
        self, device: str, *, log: Path | None = None, watchdog_s: float = WATCHDOG_S, serve: Serve = begin
    ) -> None:
        self._device, self._log, self._watchdog_s, self._serve = device, log, watchdog_s, serve
        self._child: Child | None = None
        self._opened: Open | None = None
        self._is_ready = self._is_open = False
        self.starts = 0

    def __enter__(self) -> DeviceProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> None:
        """Start it without waiting until it is ready."""
        if self._child is None:
            self._child = Child(self._serve, log=self._log)
            self._is_ready = self._is_open = False
            self.starts += 1
            with contextlib.suppress(ChildLostError):  # The next request finds out.
                self._child.send(self._device)

    def open(self, problem: AttentionProblem, cases: tuple[Case, ...]) -> None:
        """Turn to a problem: its tensors are made at the next request, and again in each process that follows."""
        self._opened, self._is_open = Open(problem=problem, cases=cases), False

    def check(self, candidate: Candidate) -> str | None:
        """The gate's refusal of a candidate, or None.

        Raises:
            CandidateLostError: it took the process with it. So for the others.
            EnvironmentProblemError: the process does not start, or memory does not hold the tensors.
        """
        refusal: str | None = self._ask(Check(candidate=candidate))
        return refusal

    def screen(self, candidate: Candidate, cases: dict[int, float], short: frozenset[int]) -> dict[int, float]:
        """As ``worker.Screen``."""
        times: dict[int, float] = self._ask(Screen(candidate=candidate, cases=cases, short=short))
        return times

    def rounds(self, candidates: tuple[Candidate, ...], case: int, *, short: bool, rounds: int) -> list[list[float]]:
        """As ``worker.Rounds``."""
        times: list[list[float]] = self._ask(Rounds(candidates=candidates, case=case, short=short, rounds=rounds))
        return times

    def close(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _ask(self, request: Any) -> Any:
        child, at = self._running(), None
        try:
            child.send(request)
            while isinstance(answer := child.receive(self._watchdog_s), At):
                at = answer.candidate
        except ChildLostError as error:
            self._child = None
            raise CandidateLostError(str(error), at) from None
        if isinstance(answer, Failed):
            self.close()
            raise CandidateLostError(answer.reason, at)
        return answer

    def _running(self) -> Child:
        self.begin()
        child = self._child
        assert child is not None
        try:
            if not self._is_ready:
                child.receive(START_S)
                self._is_ready = True
            if self._opened is not None and not self._is_open:
                child.send(self._opened)
                if isinstance(answer := child.receive(OPEN_S), Failed):
                    raise ChildLostError(answer.reason)
                self._is_open = True
        except ChildLostError as error:
            self.close()
            raise EnvironmentProblemError(
                describe(
                    f"process on {self._device}",
                    value=error,
                    limit="it must start, and hold the tensors of a search",
                    remedy=f"See {self._log}." if self._log else "See its messages above.",
                )
            ) from None
        return child
