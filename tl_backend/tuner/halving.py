"""Which candidates of a case are timed again, and for how long. Pure: what measures is passed in.

Candidates are numbered as in their space; 0 is the default. Three stages: a few launches of each (the screen), some
rounds of the best, then rounds of the finalists until what is quoted is narrow.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from tl_backend.measure.timing import ratio

DEFAULT = 0
# Times each candidate's launches taking turns: (candidates, rounds) -> milliseconds of each. One that was lost is
# missing from the answer.
Measure = Callable[[tuple[int, ...], int], Mapping[int, list[float]]]

# Medians of three launches are off by 3% at most on a quiet device: what is slower by 30% cannot win.
SCREEN_MARGIN = 1.3
SEMIFINALISTS = 8
SEMIFINAL_ROUNDS = 5
SEMIFINAL_MARGIN = 1.04
FINALISTS = 4
# Rounds come in lots, until the interval of each near winner's ratio is narrow, or time or rounds are up.
LOT = 8
MIN_ROUNDS = 16
MAX_ROUNDS = 48
MAX_SECONDS = 0.5
WIDTH = 0.015
NEAR = 1.01


def best_first(times: Mapping[int, float], margin: float, limit: int) -> list[int]:
    """At most ``limit`` candidates within ``margin`` of the best, best first; equals in the order of the space."""
    if not times:
        return []
    bound = min(times.values()) * margin
    within = [index for index in sorted(times) if times[index] <= bound]
    return sorted(within, key=lambda index: times[index])[:limit]


def semifinal(measure: Measure, screened: Mapping[int, float]) -> dict[int, float]:
    """Medians of those that the screen leaves, and of the default, in rounds in which they take turns."""
    chosen = best_first(screened, SCREEN_MARGIN, SEMIFINALISTS)
    times = measure(tuple(sorted({DEFAULT, *chosen})), SEMIFINAL_ROUNDS)
    return {index: statistics.median(samples) for index, samples in times.items()}


def final(measure: Measure, semifinals: Mapping[int, float], shared: frozenset[int]) -> dict[int, list[float]]:
    """Paired samples of the finalists and the default.

    Args:
        semifinals: medians.
        shared: candidates that are good elsewhere: timed here too, so that one config may serve several cases.
    """
    chosen = {DEFAULT, *best_first(semifinals, SEMIFINAL_MARGIN, FINALISTS), *shared}
    times: dict[int, list[float]] = {}
    for _ in range(MAX_ROUNDS // LOT):
        lot = measure(tuple(sorted(chosen)), LOT)
        chosen &= set(lot)
        if DEFAULT not in chosen:
            return {}
        times = {index: times.get(index, []) + lot[index] for index in sorted(chosen)}
        if is_settled(times):
            break
    return times


def is_settled(times: Mapping[int, list[float]]) -> bool:
    """Whether more rounds would not change much: each near winner's ratio has a narrow interval, or time is up."""
    if sum(map(sum, times.values())) >= MAX_SECONDS * 1e3:
        return True
    if len(times[DEFAULT]) < MIN_ROUNDS:
        return False
    ratios = {index: ratio(samples, times[DEFAULT]) for index, samples in times.items()}
    best = max(found["median"] for found in ratios.values())
    return all(
        found["high"] - found["low"] <= WIDTH * found["median"]
        for found in ratios.values()
        if found["median"] * NEAR >= best
    )
