"""The search of one problem: compile, gate and screen every candidate, then time the best of each case."""

from __future__ import annotations

import time

from tl_backend.configs.words import format_problem
from tl_backend.tuner.admission import Admission
from tl_backend.tuner.finals import Finals
from tl_backend.tuner.found import Outcome
from tl_backend.tuner.recall import recall_candidates
from tl_backend.tuner.state import State


def search(state: State) -> Outcome:
    """Search one problem on one device until all is found or the time is up.

    Raises:
        EnvironmentProblemError: nothing can run on the device.
    """
    waiting = recall_candidates(state)
    label, total = format_problem(state.plan.problem), len(state.keys)
    state.progress.begin(label, total=total, known=total - len(waiting))
    try:
        state.process.open(state.plan.problem, state.cases)
        Admission(state).run(waiting)
        for kind, found in state.found.items():
            found.complete = found.error is None and not any(name == kind for name, _ in waiting)
        Finals(state).run()
    finally:
        state.progress.end()
    return Outcome(
        problem=state.plan.problem,
        kinds=state.found,
        measuring_s=state.busy_s,
        seconds=time.monotonic() - state.begun,
    )
