"""The second stage of a search: in each case the best candidates and the default take turns."""

from __future__ import annotations

import functools

from tl_backend.tuner.admission import TICK_S
from tl_backend.tuner.device_process import CandidateLostError
from tl_backend.tuner.found import Found
from tl_backend.tuner.halving import DEFAULT, MIN_ROUNDS, Measure, final, semifinal
from tl_backend.tuner.journal import config_key
from tl_backend.tuner.recall import recall_finals
from tl_backend.tuner.regimes import Case
from tl_backend.tuner.select import shared
from tl_backend.tuner.state import State


class Finals:
    """Holds the finals of a search."""

    def __init__(self, state: State) -> None:
        self._state = state

    def run(self) -> None:
        """All that the journal does not know, until the time is up."""
        for kind, found in self._state.live():
            recall_finals(self._state, kind)
            self._settle(kind, found)

    def _settle(self, kind: str, found: Found) -> None:
        state = self._state
        if kind not in state.short:
            return  # The time was up before even the default was screened.
        left = [case for case in found.cases if case not in found.finals]
        semifinals: dict[Case, dict[int, float]] = {}
        for case in left:
            if state.is_late():
                return
            semifinals[case] = semifinal(self._measure(kind, case), found.screened[case])
            state.progress.timed()
        everywhere = shared({case: {**found.screened[case], **semifinals[case]} for case in left})
        for case in left:
            if state.is_late() or found.error is not None:
                return
            times = final(self._measure(kind, case), semifinals[case], everywhere - found.refused.keys())
            if times:
                found.finals[case] = times
                state.journal.add(
                    "final",
                    kind=kind,
                    case=str(case),
                    screened=state.digest(kind),
                    ms={config_key(found.candidates[index]): samples for index, samples in times.items()},
                )
            state.progress.timed()

    def _measure(self, kind: str, case: Case) -> Measure:
        return functools.partial(self._rounds, kind, case)

    def _rounds(self, kind: str, case: Case, chosen: tuple[int, ...], rounds: int) -> dict[int, list[float]]:
        """As ``Measure``; candidates that are lost on the way are refused."""
        state, number = self._state, self._state.numbers[case]
        self._fetch(kind, chosen)
        while chosen := tuple(index for index in chosen if index not in state.found[kind].refused):
            candidates = tuple(state.candidate(kind, index) for index in chosen)
            try:
                with state.busy():
                    times = state.process.rounds(candidates, number, short=number in state.short[kind], rounds=rounds)
                return dict(zip(chosen, times, strict=True))
            except CandidateLostError as error:
                culprits = self._culprits(kind, number, chosen, error)
            for index, reason in culprits.items():
                state.refuse(kind, index, f"process: {reason}")
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
        state = self._state
        try:
            with state.busy():
                state.process.rounds(
                    (state.candidate(kind, index),), case, short=case in state.short[kind], rounds=MIN_ROUNDS
                )
        except CandidateLostError as error:
            return error
        return None

    def _fetch(self, kind: str, chosen: tuple[int, ...]) -> None:
        """Kernels that an earlier run has compiled: from the disk cache, where they still are."""
        state, kernels = self._state, self._state.kernels
        wanted = [key for index in chosen for key in state.keys[kind, index]]
        kernels.ask(wanted)
        while not all(key in kernels.artifacts or key in kernels.errors for key in wanted):
            kernels.wait(TICK_S)
        for index in chosen:
            error = kernels.error(state.keys[kind, index])
            if error is not None and index not in state.found[kind].refused:
                state.refuse(kind, index, f"does not compile: {error}")
