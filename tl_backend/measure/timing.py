"""Times of launches on a device, and the ratio of two.

A row's answer is checked before it is timed. Candidate and peer alternate in one process on the same tensors; what is
quoted is the median of paired ratios with its 95% interval: a card's clock moves more between runs than in a pair.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Launch = Callable[[], object]

ROUNDS = 31
WARMUP = 5
# Rounds at most, for ratios whose interval is too wide: ten times as many narrow it to a third.
MAX_ROUNDS = 10 * ROUNDS
MAX_WIDTH = 0.02  # Of a ratio's 95% interval, in parts of the ratio.


def time_ms(
    launches: dict[str, Launch], device: torch.device, *, rounds: int = ROUNDS, warmup: int = WARMUP, cold: bool = False
) -> dict[str, list[float]]:
    """Milliseconds of each launch in each round, the launches taking turns; ``cold`` empties a GPU's L2 before each."""
    for launch in list(launches.values()) * warmup:
        launch()
    if device.type == "cpu":
        return _time_on_cpu(launches, rounds)
    evict = torch.empty(256 << 20, dtype=torch.uint8, device="cuda") if cold else None  # Four times an H200's L2.
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in launches}
    for _ in range(rounds):
        for name, launch in launches.items():
            if evict is not None:
                evict.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            launch()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def _time_on_cpu(launches: dict[str, Launch], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in launches}
    for _ in range(rounds):
        for name, launch in launches.items():
            start = time.perf_counter()
            launch()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def as_graph(launch: Launch, device: torch.device) -> Launch:
    """The launch as a CUDA-graph replay: short kernels are timed without the host's share. On a CPU as it is."""
    if device.type == "cpu":
        return launch
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # What a library sets up at its first launch on a stream is not captured.
        launch()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):  # torch.cuda.graph would empty the allocator's cache at each: tens of milliseconds.
        graph.capture_begin()
        launch()
        graph.capture_end()
    return graph.replay


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Attributes: times: milliseconds of each launch in each round; ratios: of each peer, as ``ratio`` gives them."""

    times: dict[str, list[float]]
    ratios: dict[str, dict[str, float]]

    @property
    def is_settled(self) -> bool:
        """Whether every interval is narrow enough to be quoted."""
        return all(r["high"] - r["low"] <= MAX_WIDTH * r["median"] for r in self.ratios.values())


def compare(
    candidate: str,
    launches: dict[str, Launch],
    device: torch.device,
    *,
    rounds: int = ROUNDS,
    max_rounds: int = MAX_ROUNDS,
    cold: bool = False,
) -> Comparison:
    """Time a candidate beside its peers, with more rounds until every ratio is settled or ``max_rounds`` are done."""
    found = Comparison(times={name: [] for name in launches}, ratios={})
    while not found.ratios or (not found.is_settled and len(found.times[candidate]) < max_rounds):
        more = time_ms(launches, device, rounds=rounds, warmup=0 if found.ratios else WARMUP, cold=cold)
        times = {name: found.times[name] + more[name] for name in launches}
        ratios = {name: ratio(times[candidate], values) for name, values in times.items() if name != candidate}
        found = Comparison(times=times, ratios=ratios)
        if not ratios:
            break
    return found


def ratio(candidate: list[float], peer: list[float]) -> dict[str, float]:
    """How many times faster the candidate is: median of paired ratios, with a 95% interval of that median."""
    ratios = sorted(p / c for c, p in zip(candidate, peer, strict=True))
    # The interval between order statistics of a binomial(n, 1/2): n/2 -+ 1.96 * sqrt(n) / 2.
    half = 1.96 * len(ratios) ** 0.5 / 2
    low, high = max(0, int(len(ratios) / 2 - half)), min(len(ratios) - 1, int(len(ratios) / 2 + half))
    return {"median": statistics.median(ratios), "low": ratios[low], "high": ratios[high]}


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    """``|got - want| / |want|``; NaN if either has one."""
    return float((got.double() - want).norm() / want.norm())
