"""One row of a benchmark: a workload's times on this package's kernels and on every peer that is there."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace

import torch

from tl_backend.configs.choice import Chooser
from tl_backend.measure.answers import Answers
from tl_backend.measure.ceilings import Ceilings
from tl_backend.measure.peer import Peer
from tl_backend.measure.peers import first_line, peers_of
from tl_backend.measure.timing import MAX_ROUNDS, ROUNDS, Launch, as_graph, compare
from tl_backend.measure.workload import Batch, Workload
from tl_backend.ops import AttentionPlan
from tl_backend.problem import AttentionProblem

TILELANG = "tilelang"


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
    row = Row(
        name=workload.name,
        problem=workload.problem,
        query_lens=workload.query_lens,
        seq_lens=workload.seq_lens,
        flops=workload.flops,
        io_bytes=float(workload.io_bytes),
    )
    batch = Batch(workload, device)
    answers = Answers(batch)
    try:
        plan = batch.plan(chooser)
        launch, out = batch.tilelang(plan=plan)
        launch()
        error = answers.error(out)
        row = replace(
            row,
            source=_source(plan),
            error=error if math.isfinite(error) else None,  # JSON has no NaN.
            problems=answers.problem_of(out),
        )
        launches = {TILELANG: as_graph(launch, device)} if row.problems is None else {}
    except Exception as failure:  # noqa: BLE001
        return replace(row, problems=_said(failure))
    if not launches:
        return row
    there = peers_of(batch, answers)
    absent = dict(there.absent)
    for name, peer in there.peers.items():
        captured = _captured(peer, device)
        if isinstance(captured, str):
            absent[name] = captured
        else:
            launches[name] = captured
    found = compare(TILELANG, launches, device, rounds=rounds, max_rounds=max_rounds, cold=cold)
    return replace(
        row,
        kernels={name: _kernel(values, workload, ceilings) for name, values in found.times.items()},
        what={name: there.peers[name].what for name in found.ratios},
        times=found.ratios,
        rounds=len(found.times[TILELANG]),
        is_settled=found.is_settled,
        absent=absent,
    )


def _captured(peer: Peer, device: torch.device) -> Launch | str:
    """Its launch as a graph's replay, or why there is none."""
    try:
        return as_graph(peer.launch, device)
    except Exception as failure:  # noqa: BLE001
        return f"no graph captures it: {_said(failure)}"


def _said(failure: Exception) -> str:
    return f"{type(failure).__name__}: {first_line(failure)}"


def _kernel(times_ms: list[float], workload: Workload, ceilings: Ceilings) -> Kernel:
    ms = statistics.median(times_ms)
    return Kernel(
        us=ms * 1e3,
        tflops=workload.flops / ms / 1e9,
        tbps=workload.io_bytes / ms / 1e9,
        of_roofline=ceilings.least_ms(workload.flops, workload.io_bytes) / ms,
    )


def _source(plan: AttentionPlan) -> str:
    parts = [part.source for part in (plan.decode, plan.prefill) if part is not None]
    return "; ".join(dict.fromkeys(parts))
