"""Which configs a table gets, from the finalists' times. Pure.

A server compiles every config of its tables before it is ready, so that each one more has to be worth it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tl_backend.measure.timing import ratio
from tl_backend.tuner.halving import DEFAULT

# Tiles beside the default's, of a problem and kind: a decode's are two kernels each.
MAX_TILES = 4
# Candidates that are timed in every case's final, since they are good elsewhere.
MAX_SHARED = 5
# A gain below this is not worth a row, even if it is certain.
MIN_GAIN = 1.01
# Medians that are this near are equal: the ratio of a kernel to itself has been seen to vary by as much.
TIE = 1.005
# A further config must gain this much in one case, or a little in several.
MIN_LOG_GAIN = math.log(1.01)

CaseKey = TypeVar("CaseKey", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """How many times faster than the default: median of paired ratios, with its 95% interval."""

    median: float
    low: float
    high: float

    @property
    def is_one(self) -> bool:
        """Whether it is more than the noise, and worth a row."""
        return self.low > 1.0 and self.median > MIN_GAIN


def gains(times: Mapping[int, list[float]]) -> dict[int, Gain]:
    """The gain of each candidate of a case over the default."""
    return {index: Gain(**ratio(samples, times[DEFAULT])) for index, samples in times.items()}


def choose(
    times: Mapping[CaseKey, Mapping[int, list[float]]],
    *,
    tile_of: Callable[[int], Hashable] = int,
    max_tiles: int = MAX_TILES,
) -> dict[CaseKey, int]:
    """The candidate of each case: ``DEFAULT``, or one that beats it there.

    Greedy: each tile in turn is the one that adds most to the geomean over cases. A case takes the best of its
    candidates that have one of those tiles; where several are equal, the one whose tile was taken first.

    Args:
        times: paired samples of each case's finalists and default.
        tile_of: what a candidate shares with others that cost no more kernels; the default's tile is free.
        max_tiles: beside the default's.
    """
    winners = {
        case: {index: gain.median for index, gain in gains(samples).items() if index != DEFAULT and gain.is_one}
        for case, samples in times.items()
    }
    tiles = {index: tile_of(index) for found in winners.values() for index in found}
    free = tile_of(DEFAULT)
    taken: list[Hashable] = [free]
    while len(taken) <= max_tiles:
        added = {tile: _log_gain(winners, tiles, [*taken, tile]) for tile in tiles.values()}
        if not added:
            break
        most = max(added.values())
        # Equals in the order of the space.
        best = next(tiles[index] for index in sorted(tiles) if added[tiles[index]] >= most - math.log(TIE))
        if added[best] - _log_gain(winners, tiles, taken) < MIN_LOG_GAIN:
            break
        taken.append(best)
    return {case: _best(found, tiles, taken) for case, found in winners.items()}


def _log_gain(
    winners: Mapping[CaseKey, Mapping[int, float]], tiles: Mapping[int, Hashable], taken: list[Hashable]
) -> float:
    return sum(
        math.log(max([1.0, *(gain for index, gain in found.items() if tiles[index] in taken)]))
        for found in winners.values()
    )


def _best(found: Mapping[int, float], tiles: Mapping[int, Hashable], taken: list[Hashable]) -> int:
    there = sorted((taken.index(tiles[index]), index) for index in found if tiles[index] in taken)
    if not there:
        return DEFAULT
    best = max(found[index] for _, index in there)
    return next(index for _, index in there if found[index] * TIE >= best)


def shared(times: Mapping[CaseKey, Mapping[int, float]], *, limit: int = MAX_SHARED) -> frozenset[int]:
    """Candidates that would serve all cases best together, by medians that are less certain.

    Args:
        times: medians of each case; the default's among them.
    """
    winners = {
        case: {index: samples[DEFAULT] / ms for index, ms in samples.items() if index != DEFAULT}
        for case, samples in times.items()
        if DEFAULT in samples
    }
    own = {index: index for found in winners.values() for index in found}
    taken: list[Hashable] = []
    for _ in range(limit):
        added = {index: _log_gain(winners, own, [*taken, index]) for index in own if index not in taken}
        if not added:
            break
        most = max(added.values())
        taken.append(min(index for index, value in added.items() if value >= most - math.log(TIE)))
    return frozenset(index for index in own if index in taken)


def ranking(times: Mapping[CaseKey, Mapping[int, float]], limit: int) -> list[int]:
    """The candidates that are best on the geomean over all cases, best first; the default is not among them.

    One without a time in a case counts as its worst there.
    """
    everyone = {index for samples in times.values() for index in samples} - {DEFAULT}
    score = {
        index: sum(math.log(samples.get(index, max(samples.values()))) for samples in times.values() if samples)
        for index in everyone
    }
    return sorted(everyone, key=lambda index: (score[index], index))[:limit]
