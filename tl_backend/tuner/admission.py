"""The first stage of a search: every candidate passes the gate and is screened, as its kernels come."""

from __future__ import annotations

from tl_backend.tuner.device_process import CandidateLostError
from tl_backend.tuner.halving import DEFAULT
from tl_backend.tuner.journal import config_key
from tl_backend.tuner.state import State
from tl_backend.tuner.worker import Candidate

# Launches that the default takes no longer for are timed as graphs with a cold L2: the host would be a part of them.
SHORT_MS = 0.2
TICK_S = 0.5
# Of a time budget: what is left for the finals when admission has to stop.
RESERVE = 0.2


class Admission:
    """Admits the candidates of a search."""

    def __init__(self, state: State) -> None:
        self._state = state

    def run(self, waiting: dict[tuple[str, int], None]) -> None:
        """Admit all in ``waiting``; what is left there when the time is up was not tried."""
        state = self._state
        state.kernels.ask(key for candidate in waiting for key in state.keys[candidate])
        while waiting:
            ready = [candidate for candidate in waiting if self._is_ready(*candidate)]
            for candidate in ready:
                if state.is_late(RESERVE):
                    break
                del waiting[candidate]
                self._admit(*candidate)
            if state.is_late(RESERVE):
                state.progress.say("time is up: no more candidates")
                state.kernels.give_up_waiting()
                return
            if not ready and state.kernels.wait(TICK_S) is not None:
                state.progress.compiled()

    def _is_ready(self, kind: str, index: int) -> bool:
        if self._state.found[kind].error is not None:
            return True  # Nothing is done with it.
        if index != DEFAULT and kind not in self._state.short:
            return False  # The default is first: it says how a case is timed.
        keys = self._state.keys[kind, index]
        return self._state.kernels.error(keys) is not None or self._state.kernels.are_there(keys)

    def _admit(self, kind: str, index: int) -> None:
        state = self._state
        if state.found[kind].error is not None:
            return
        if (error := state.kernels.error(state.keys[kind, index])) is not None:
            state.refuse(kind, index, f"does not compile: {error}")
            return
        candidate = state.candidate(kind, index)
        try:
            with state.busy():
                refusal = state.process.check(candidate)
                if refusal is None:
                    self._screen(kind, index, candidate)
        except CandidateLostError as error:
            refusal = f"process: {error}"
        if refusal is not None:
            state.refuse(kind, index, refusal)

    def _screen(self, kind: str, index: int, candidate: Candidate) -> None:
        state, cases = self._state, self._state.plan.cases[kind]
        screened = state.found[kind].screened
        best = {state.numbers[case]: min(screened.get(case, {}).values(), default=float("inf")) for case in cases}
        if index == DEFAULT:
            times = state.process.screen(candidate, best, frozenset())
            state.short[kind] = frozenset(number for number, ms in times.items() if ms <= SHORT_MS)
        times = state.process.screen(candidate, best, state.short[kind])
        for case in cases:
            screened.setdefault(case, {})[index] = times[state.numbers[case]]
        state.journal.add(
            "screened",
            kind=kind,
            config=config_key(candidate.config),
            ms={str(case): times[state.numbers[case]] for case in cases},
            short=[str(case) for case in cases if state.numbers[case] in state.short[kind]],
        )
        state.progress.screened(screened)
