"""What a journal knows of a search."""

from __future__ import annotations

from tl_backend.tuner.halving import DEFAULT
from tl_backend.tuner.journal import config_key
from tl_backend.tuner.state import State


def recall_candidates(state: State) -> dict[tuple[str, int], None]:
    """Take what is known; the candidates that are not yet, the defaults first and the kinds in turns."""
    known: set[tuple[str, int]] = set()
    indices = _indices(state)
    for line in state.journal.events("screened"):
        kind = line["kind"]
        index = indices.get((kind, line["config"]))
        if index is None or not set(map(str, state.plan.cases[kind])) <= line["ms"].keys():
            continue
        for case in state.plan.cases[kind]:
            state.found[kind].screened.setdefault(case, {})[index] = line["ms"][str(case)]
        if index == DEFAULT:
            state.short[kind] = frozenset(
                state.numbers[case] for case in state.plan.cases[kind] if str(case) in line["short"]
            )
        known.add((kind, index))
    for line in state.journal.events("refused"):
        if (index := indices.get((line["kind"], line["config"]))) is not None:
            state.note_refusal(line["kind"], index, line["reason"])
            known.add((line["kind"], index))
    waiting = sorted(state.keys.keys() - known, key=lambda candidate: (candidate[1], candidate[0] != "prefill"))
    return dict.fromkeys(waiting)


def recall_finals(state: State, kind: str) -> None:
    """Take the finals that were held among the candidates of now."""
    cases, indices = {str(case): case for case in state.plan.cases[kind]}, _indices(state)
    for line in state.journal.events("final"):
        if line["kind"] == kind and line["screened"] == state.digest(kind) and line["case"] in cases:
            state.found[kind].finals[cases[line["case"]]] = {
                indices[kind, config]: samples for config, samples in line["ms"].items()
            }


def _indices(state: State) -> dict[tuple[str, str], int]:
    return {
        (kind, config_key(config)): index
        for kind, found in state.found.items()
        for index, config in enumerate(found.candidates)
    }
