"""One row of a benchmark: a workload's times on this package's kernels and on every peer that is there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from tl_backend.configs.choice import Chooser
from tl_backend.measure.answers import Answers
from tl_backend.measure.ceilings import Ceilings
from tl_backend.measure.peer import Peer
from tl_backend.measure.peers import Field, first_line, peers_of
from tl_backend.measure.timing import MAX_ROUNDS, ROUNDS, Launch, StepCost, as_graph, compare, ratio, step_cost
from tl_backend.measure.workload import Batch, Workload
from tl_backend.ops import AttentionPlan
from tl_backend.problem import AttentionProblem

TILELANG = "tilelang"
# Launches of a short kernel in one graph.
MAX_REPEATS = 8


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel's time: the median of its rounds.

    Attributes:
        us: microseconds.
        tflops: TFLOP/s; masked pairs are not counted.
        tbps: TB/s of keys, values, queries and output, each once.
        of_roofline: the least time that the device's ceilings allow, in parts of this one.
    """

    us: float
    tflops: float
    tbps: float
    of_roofline: float


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A config of this package that takes turns with the one of the row.

    Attributes:
        error, problems: as of ``Row``.
        us: microseconds; None if it was not timed.
        times: how many times faster than each peer it is, as of ``Row``.
    """

    error: float | None = None
    problems: str | None = None
    us: float | None = None
    times: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of a workload.

    Attributes:
        name, problem, query_lens, seq_lens: of the workload.
        flops, io_bytes: of one attention.
        source: what chose the config: a table's row or the family's default.
        error: worst relative RMS of a checked row against float64; None if there is none that is finite.
        problems: why nothing was timed; None if all is well.
        kernels: by name; this package's is ``TILELANG``.
        what: program and version of each peer.
        times: how many times faster than a peer this package is: median, low and high of a 95% interval.
        rounds: of each kernel.
        is_settled: whether every interval is narrow enough to be quoted.
        absent: why a peer is not among the kernels.
        launches_a_round: of each kernel, one after another.
        step: of the kernels that were charged with a step's preparation, what it takes: their ``us`` hold a part.
        variants: other configs of this package.
        beside: how many times faster than other launches this package is, as ``times``.
    """

    name: str
    problem: AttentionProblem
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    flops: float
    io_bytes: float
    source: str = ""
    error: float | None = None
    problems: str | None = None
    kernels: dict[str, Kernel] = field(default_factory=dict)
    what: dict[str, str] = field(default_factory=dict)
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    rounds: int = 0
    is_settled: bool = False
    absent: dict[str, str] = field(default_factory=dict)
    launches_a_round: int = 1
    step: dict[str, StepCost] = field(default_factory=dict)
    variants: dict[str, Variant] = field(default_factory=dict)
    beside: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, workload: Workload, *, problems: str | None = None) -> Row:
        """A row of which nothing is known but its workload, and perhaps why."""
        return cls(
            name=workload.name,
            problem=workload.problem,
            query_lens=workload.query_lens,
            seq_lens=workload.seq_lens,
            flops=workload.flops,
            io_bytes=float(workload.io_bytes),
            problems=problems,
        )


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a row is measured.

    Attributes:
        rounds, max_rounds, max_seconds, cold: as for ``timing.compare``.
        layers: what a step's plan takes of the device, and a peer's preparation, is charged to each launch divided by
            so many; None to charge nothing.
        least_us: launches that take less by the roofline are repeated in their graph, up to ``MAX_REPEATS`` times.
        field_of: the peers, as ``peers_of`` gives them.
    """

    rounds: int = ROUNDS
    max_rounds: int = MAX_ROUNDS
    max_seconds: float = math.inf
    cold: bool = False
    layers: int | None = None
    least_us: float = 0.0
    field_of: Callable[[Batch, Answers], Field] = peers_of


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """A kernel whose answer is right, captured. Attributes: cost: of its preparation once a step, where asked."""

    launch: Launch
    cost: StepCost | None


def measure_row(
    workload: Workload,
    device: torch.device,
    ceilings: Ceilings,
    *,
    chooser: Chooser | None = None,
    cold: bool = False,
    rounds: int = ROUNDS,
    max_rounds: int = MAX_ROUNDS,
) -> Row:
    """Check, then time. Neither a wrong answer nor a peer that fails ends a benchmark: the row says so.

    Args:
        chooser: of this package's configs. Default: this device's tables.
        cold: empty the L2 cache before each launch.
        rounds, max_rounds: as for ``timing.compare``.
    """
    method = Method(rounds=rounds, max_rounds=max_rounds, cold=cold)
    batch = Batch(workload, device)
    return measure_batch(batch, Answers(batch), ceilings, method, chooser=chooser)


def measure_batch(
    batch: Batch,
    answers: Answers,
    ceilings: Ceilings,
    method: Method,
    *,
    chooser: Chooser | None = None,
    variants: Mapping[str, Chooser] | None = None,
    beside: Mapping[str, Launch] | None = None,
) -> Row:
    """``measure_row`` of tensors that are there.

    Args:
        chooser: of this package's configs. Default: this device's tables.
        variants: choosers of other configs, which take turns with that one.
        beside: other launches that take turns; the row has their ratios.
    """
    workload, device = batch.workload, batch.device
    least_us = ceilings.least_ms(workload.flops, workload.io_bytes) * 1e3
    repeats = max(1, min(MAX_REPEATS, int(method.least_us / least_us)))
    row, ready, tries = Row.of(workload), {}, {}
    for name, chosen in {TILELANG: chooser, **(variants or {})}.items():
        tried, source, kernel = _own(batch, answers, chosen, repeats, method)
        if kernel is not None:
            ready[name] = kernel
        if name != TILELANG:
            tries[name] = tried
            continue
        row = replace(row, source=source, error=tried.error, problems=tried.problems)
        if kernel is None:
            return row
    there = method.field_of(batch, answers)
    absent = dict(there.absent)
    for name, peer in there.peers.items():
        captured = _peer(peer, answers, repeats, method)
        if isinstance(captured, str):
            absent[name] = captured
        else:
            ready[name] = captured
    launches = {name: kernel.launch for name, kernel in ready.items()}
    launches |= {name: as_graph(launch, device, repeats) for name, launch in (beside or {}).items()}
    costs = {name: kernel.cost for name, kernel in ready.items() if kernel.cost is not None}
    found = compare(
        TILELANG, launches, device,
        rounds=method.rounds, max_rounds=method.max_rounds, max_seconds=method.max_seconds, cold=method.cold,
        charges_ms={name: cost.device_us / 1e3 * repeats / (method.layers or 1) for name, cost in costs.items()},
    )  # fmt: skip
    peers = [name for name in found.ratios if name in there.peers]
    us = {name: statistics.median(values) * 1e3 / repeats for name, values in found.times.items()}
    for name in tries.keys() & us.keys():
        times = {peer: ratio(found.times[name], found.times[peer]) for peer in peers}
        tries[name] = replace(tries[name], us=us[name], times=times)
    return replace(
        row,
        kernels={name: _kernel(us[name], workload, ceilings) for name in (TILELANG, *peers)},
        what={name: there.peers[name].what for name in peers},
        times={name: found.ratios[name] for name in peers},
        beside={name: found.ratios[name] for name in beside or ()},
        step=costs,
        variants=tries,
        rounds=len(found.times[TILELANG]),
        launches_a_round=repeats,
        is_settled=found.is_settled,
        absent=absent,
    )


def _own(
    batch: Batch, answers: Answers, chooser: Chooser | None, repeats: int, method: Method
) -> tuple[Variant, str, _Ready | None]:
    """Of this package: what its answer is worth, what chose its config, and the captured launch, if it is right."""
    source, error = "", None
    try:
        planner = batch.planner(chooser)
        plan = planner()
        source = _source(plan)
        launch, out = batch.tilelang(plan=plan)
        launch()
        error = answers.error(out)
        error = error if math.isfinite(error) else None  # JSON has no NaN.
        if (wrong := answers.problem_of(out)) is not None:
            return Variant(error=error, problems=wrong), source, None
        cost = None if method.layers is None else step_cost(planner, batch.device)
        captured, wrong = _captured(launch, lambda: out, answers, repeats)
    except Exception as failure:  # noqa: BLE001
        return Variant(error=error, problems=_said(failure)), source, None
    return Variant(error=error, problems=wrong), source, None if wrong else _Ready(launch=captured, cost=cost)


def _peer(peer: Peer, answers: Answers, repeats: int, method: Method) -> _Ready | str:
    """Its launch as a graph's replay, or why there is none."""
    try:
        captured, wrong = _captured(peer.launch, peer.output, answers, repeats)
        if wrong is not None:
            return wrong
        prepares = method.layers is not None and peer.prepare is not None
        cost = step_cost(peer.prepare, answers.batch.device) if prepares and peer.prepare is not None else None
    except Exception as failure:  # noqa: BLE001
        return f"no graph captures it: {_said(failure)}"
    return _Ready(launch=captured, cost=cost)


def _captured(
    launch: Launch, output: Callable[[], torch.Tensor], answers: Answers, repeats: int
) -> tuple[Launch, str | None]:
    """The launch as a graph's replay, and what is wrong with what a second replay writes.

    What a launch leaves behind, a counter say, is what the next one finds: one that did nothing would seem fast.
    """
    captured = as_graph(launch, answers.batch.device, repeats)
    captured()
    output().fill_(torch.nan)
    captured()
    return captured, answers.problem_of(output())


def _said(failure: Exception) -> str:
    return f"{type(failure).__name__}: {first_line(failure)}"


def _kernel(us: float, workload: Workload, ceilings: Ceilings) -> Kernel:
    return Kernel(
        us=us,
        tflops=workload.flops / us / 1e6,
        tbps=workload.io_bytes / us / 1e6,
        of_roofline=ceilings.least_ms(workload.flops, workload.io_bytes) * 1e3 / us,
    )


def _source(plan: AttentionPlan) -> str:
    parts = [part.source for part in (plan.decode, plan.prefill) if part is not None]
    return "; ".join(dict.fromkeys(parts))
