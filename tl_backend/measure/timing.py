"""Times of launches on a device, and the ratio of two.

A row's answer is checked before it is timed. Candidate and peer alternate in one process on the same tensors; what is
quoted is the median of paired ratios with its 95% interval: a card's clock moves more between runs than in a pair.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

Launch = Callable[[], object]

ROUNDS = 31
WARMUP = 5
# Rounds at most, for ratios whose interval is too wide: ten times as many narrow it to a third.
MAX_ROUNDS = 10 * ROUNDS
MIN_ROUNDS = 11
MAX_WIDTH = 0.02  # Of a ratio's 95% interval, in parts of the ratio.
# What keeps a GPU busy while the host issues the work behind it: about a millisecond.
SLEEP_CYCLES = 2_000_000
STEP_ROUNDS = 5


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
            times[name].append(_host_us(launch) / 1e3)
    return times


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What is done once a step for all layers: microseconds of the device, and of the host until it has issued it."""

    device_us: float
    host_us: float


def step_cost(prepare: Launch, device: torch.device, *, rounds: int = STEP_ROUNDS) -> StepCost:
    """The medians. The device's is taken behind other work, so that it does not wait for the host meanwhile."""
    prepare()
    costs = [_once(prepare) if device.type == "cuda" else (0.0, _host_us(prepare)) for _ in range(rounds)]
    device_us, host_us = (statistics.median(column) for column in zip(*costs, strict=True))
    return StepCost(device_us=device_us, host_us=host_us)


def _once(prepare: Launch) -> tuple[float, float]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    host_us = _host_us(prepare)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3, host_us


def _host_us(launch: Launch) -> float:
    start = time.perf_counter()
    launch()
    return (time.perf_counter() - start) * 1e6


def as_graph(launch: Launch, device: torch.device, repeats: int = 1) -> Launch:
    """The launch as a CUDA-graph replay: short kernels are timed without the host's share. On a CPU as it is.

    Args:
        repeats: launches one after another in the graph. The time between two events has some microseconds that are
            not the kernel's: a short kernel's are spread over several.
    """
    if device.type == "cpu":
        return launch if repeats == 1 else _repeated(launch, repeats)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # What a library sets up at its first launch on a stream is not captured.
        launch()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):  # torch.cuda.graph would empty the allocator's cache at each: tens of milliseconds.
        graph.capture_begin()
        try:
            for _ in range(repeats):
                launch()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # A capture that stays open would fail all that follows.
                graph.capture_end()
            raise
        graph.capture_end()
    return partial(_replay, graph, launch)


def _replay(graph: torch.cuda.CUDAGraph, launch: Launch) -> None:
    """``launch`` holds the tensors that the graph reads and writes, for as long as it can be replayed."""
    del launch
    graph.replay()


def _repeated(launch: Launch, repeats: int) -> Launch:
    def launch_all() -> None:
        for _ in range(repeats):
            launch()

    return launch_all


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Attributes: times: milliseconds of each launch in each round; ratios: of each peer, as ``ratio`` gives them."""

    times: dict[str, list[float]]
    ratios: dict[str, dict[str, float]]

    @property
    def round_seconds(self) -> float:
        """Of one round of all launches."""
        return sum(statistics.median(values) for values in self.times.values()) / 1e3

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
    max_seconds: float = math.inf,
    charges_ms: Mapping[str, float] | None = None,
    cold: bool = False,
) -> Comparison:
    """Time a candidate beside its peers, with more rounds until every ratio is settled or a limit is met.

    Args:
        rounds: between two looks at the ratios.
        max_rounds, max_seconds: the limits. A pass of rounds that would go past the seconds is cut, the first one to
            ``MIN_ROUNDS`` at least.
        charges_ms: added to each time of a launch: its share of what is done once for many.
        cold: as for ``time_ms``.
    """
    charges = charges_ms or {}
    found = Comparison(times={name: [] for name in launches}, ratios={})
    while not found.ratios or (not found.is_settled and len(found.times[candidate]) < max_rounds):
        warmup = 0
        if not found.ratios:
            warmup = WARMUP
            if max_seconds < math.inf:  # The warm-up says how long a round is, and is cut if that is long.
                warmup, rounds = 1, _fitting(launches, device, rounds, max_seconds, cold)
        elif (len(found.times[candidate]) + rounds) * found.round_seconds > max_seconds:
            break
        more = time_ms(launches, device, rounds=rounds, warmup=warmup, cold=cold)
        times = {name: found.times[name] + [ms + charges.get(name, 0.0) for ms in more[name]] for name in launches}
        ratios = {name: ratio(times[candidate], values) for name, values in times.items() if name != candidate}
        found = Comparison(times=times, ratios=ratios)
        if not ratios:
            break
    return found


def _fitting(launches: dict[str, Launch], device: torch.device, rounds: int, max_seconds: float, cold: bool) -> int:
    """Rounds of which ``max_seconds`` hold as many, ``MIN_ROUNDS`` at least. Launches each a few times: a warm-up."""
    times = time_ms(launches, device, rounds=WARMUP - 1, warmup=1, cold=cold)
    second = sum(statistics.median(values) for values in times.values()) / 1e3
    return max(min(rounds, int(max_seconds / max(second, 1e-9))), min(rounds, MIN_ROUNDS))


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
