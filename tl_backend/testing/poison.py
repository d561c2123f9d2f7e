"""The poison harness: runs an operation over a batch in which a fault shows, and says which rule it broke.

P1 the output starts as NaN: every row of a request must come out finite, every other row zero.
P2 unwritten slots, unowned blocks and other requests' blocks turn NaN and infinite: the output keeps its bits.
P3 block-table entries past a request's last block turn stale, -1, one past the pool, 2**31 - 1: likewise.
P4 canaries around the pool, around the output and after the scratch, and the gaps of strided views, keep their bits.
P5 queries are a strided view; dimensions of extent 1 have strides that mean nothing.
P6 the same call again, also after a call of another shape, gives the same bits, with a plan and without.
P7 another stream, a captured graph, another device: on a GPU alone, in tests/gpu/extremes.py.
P8 keys and values before the window of every query of their request turn to 6e4 and -6e4: the output keeps its bits.
   P2 makes them NaN and infinite; finite ones pass where a kernel drops those, as a maximum drops NaN.

The answer must be within a relative RMS of the float64 reference, for the worst request and not only overall: a wrong
row among a thousand right ones must show.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from tl_backend.configs import decode as decode_config
from tl_backend.ops import AttentionPlan, AttentionWorkspace, paged_attention, plan_attention
from tl_backend.ops.reference import paged_attention_reference
from tl_backend.problem import AttentionProblem
from tl_backend.testing.cases import Batch, Case, Tail, make_batch
from tl_backend.testing.views import out_view

# Relative RMS. The sum of rounding the output, and the probabilities, to the dtype is half of these.
TOLERANCES = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 4e-3}
BITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
LSE_TOLERANCE = 1e-4  # Absolute: of a natural logarithm in float32.
SCRATCH_CANARIES = 4  # Partial results after those that a plan may use.
FAR = 1000  # Keys that a bound may have too many: several tiles.
LARGE = 6e4  # Near the end of float16's range; an 8-bit cache takes its largest number.

Attention = Callable[..., torch.Tensor]


class PoisonError(AssertionError):
    """A rule was broken. The message has the rule, the value, the limit and the case."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Attributes: error: relative RMS of the worst request; tolerance: its limit; request: the worst one."""

    error: float
    tolerance: float
    request: int

    def __str__(self) -> str:
        return f"relative RMS {self.error:.2e} (limit {self.tolerance:.0e}, worst in request {self.request})"


def check_attention(
    problem: AttentionProblem,
    case: Case,
    device: torch.device,
    *,
    operation: Attention = paged_attention,
    planned: AttentionProblem | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> Report:
    """Run ``operation`` on ``case`` under every rule.

    Args:
        planned: what the plans are made for, if the operation lays the batch out for another problem.
        operation: called as ``paged_attention``, without a plan and with one. Another one proves the harness.
        tolerance: of the worst request's relative RMS; ``TOLERANCES`` of the dtype if not given.

    Raises:
        PoisonError: a rule was broken.
    """
    batch = make_batch(problem, case, device, seed=seed)
    with forced_splits(case.num_splits):
        batch.poison(0.0, 0)
        first = run_poisoned(batch, operation)
        wanted = reference(batch)
        report = judge(batch, first, *wanted, TOLERANCES[problem.dtype] if tolerance is None else tolerance)
        num_blocks = batch.kv_cache.shape[0]
        tails: tuple[Tail, ...] = ("stale", -1, num_blocks, 2**31 - 1)
        for value, tail in zip((math.nan, math.inf, math.nan, math.inf), tails, strict=True):
            batch.poison(value, tail)
            what = f"unwritten slots are {value} and block-table tails {tail}"
            check_same_bits(batch, first, run_poisoned(batch, operation), "P2/P3", what)
        for parity in (0, 1) if len(case.seq_lens) > 1 else ():
            batch.poison(math.nan, "stale", dead=range(1 - parity, len(case.seq_lens), 2))
            alive = range(parity, len(case.seq_lens), 2)
            what = f"the blocks of all requests but {list(alive)} are NaN"
            check_same_bits(batch, first, run_poisoned(batch, operation), "P2", what, alive)
        for value in (LARGE, -LARGE) if problem.window is not None else ():
            batch.poison(value, "stale")
            what = f"keys and values outside the window are {value}"
            check_same_bits(batch, first, run_poisoned(batch, operation), "P8", what)
        batch.poison(math.nan, "stale")
        run_poisoned(_another(problem, case, device), operation)
        check_same_bits(batch, first, run_poisoned(batch, operation), "P6", "another shape has run in between")
        workspace = _check_planned(batch, first, operation, device, planned or problem)
        if case.has_prefill:
            _check_bounds(batch, operation, workspace, wanted, report.tolerance)
    return report


def _check_planned(
    batch: Batch, first: torch.Tensor, operation: Attention, device: torch.device, problem: AttentionProblem
) -> AttentionWorkspace:
    """With a plan, twice, and again after another shape has used the workspace; scratch starts as NaN."""
    case, other = batch.case, _another(batch.problem, batch.case, device)
    workspace = AttentionWorkspace(
        problem,
        device,
        max_num_reqs=max(len(case.query_lens), len(other.case.query_lens)),
        max_num_tokens=max(sum(case.query_lens), sum(other.case.query_lens)),
    )
    _grow_scratch(workspace)
    plan = make_plan(batch, workspace)
    check_same_bits(batch, first, run_poisoned(batch, operation, plan), "P6", "a plan is given")
    check_same_bits(batch, first, run_poisoned(batch, operation, plan), "P6", "the plan is used again")
    if plan.decode is not None:
        pieces = plan.decode.num_requests * plan.decode.num_splits
        _check_scratch(batch, workspace, pieces if plan.decode.num_splits > 1 else 0)
    run_poisoned(other, operation, make_plan(other, workspace))
    check_same_bits(
        batch,
        first,
        run_poisoned(batch, operation, make_plan(batch, workspace)),
        "P6",
        "the workspace has served another shape",
    )
    return workspace


def _check_bounds(
    batch: Batch,
    operation: Attention,
    workspace: AttentionWorkspace,
    wanted: tuple[torch.Tensor, torch.Tensor | None],
    tolerance: float,
) -> None:
    """The plan knows each request's keys, or bounds far above them: by these a prefill may cut keys into pieces.

    Their sum has other bits than the whole, but the same ones every time.
    """
    capacity = len(workspace.partial_o) - SCRATCH_CANARIES
    for slack in (0, FAR):
        plan = make_plan(batch, workspace, bounds=torch.tensor(batch.case.seq_lens).int() + slack)
        for scratch in (workspace.partial_o, workspace.partial_lse):
            scratch.fill_(math.nan)
        batch.poison(math.nan, "stale")
        known = run_poisoned(batch, operation, plan)
        judge(batch, known, *wanted, tolerance)
        for value, tail in ((math.inf, -1), (math.nan, 2**31 - 1)):
            batch.poison(value, tail)
            what = f"the plan has bounds {slack} too large, unwritten slots are {value} and block-table tails {tail}"
            check_same_bits(batch, known, run_poisoned(batch, operation, plan), "P2/P3/P6", what)
        _check_scratch(batch, workspace, capacity)


def make_plan(
    batch: Batch, workspace: AttentionWorkspace, *, num_splits: int | None = None, bounds: torch.Tensor | None = None
) -> AttentionPlan:
    """The plan of a batch, for the workspace's problem.

    Args:
        bounds: on the host, keys of each request at most; by default the plan knows the longest request's alone.
    """
    return plan_attention(
        workspace.problem,
        batch.cu_seqlens_q,
        batch.seq_lens,
        cu_seqlens_q_cpu=batch.cu_seqlens_q.cpu(),
        max_seqlen_q=max(batch.case.query_lens),
        max_seqlen_k=max(batch.case.seq_lens) if bounds is None else int(bounds.max()),
        workspace=workspace,
        seq_lens_cpu_upper_bound=bounds,
        num_splits=num_splits,
    )


@contextlib.contextmanager
def forced_splits(num_splits: int | None) -> Iterator[None]:
    """Cut every decode request into ``num_splits`` pieces, and size new scratch for it. None changes nothing."""
    if num_splits is None:
        yield
        return
    with (
        mock.patch.object(decode_config, "num_splits", lambda *args, **kwargs: num_splits),
        mock.patch.object(decode_config, "max_partials", lambda num_reqs, *args, **kwargs: num_reqs * num_splits),
    ):
        yield


def relative_rms(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """``|got - wanted| / |wanted|`` in float64; where ``wanted`` is all zero, 0 or infinity."""
    difference, norm = float((got.double() - wanted).norm()), float(wanted.norm())
    if norm == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / norm


def run_poisoned(batch: Batch, operation: Attention, plan: AttentionPlan | None = None) -> torch.Tensor:
    """One call, from an output of NaN; checks P4 and returns a copy of the output."""
    case = batch.case
    batch.out_store.fill_(math.nan)
    if batch.lse is not None:
        batch.lse.fill_(math.nan)
    before = batch.kv_store.clone()
    operation(
        batch.q,
        batch.kv_cache,
        batch.block_table,
        batch.cu_seqlens_q,
        batch.seq_lens,
        max_seqlen_q=max(case.query_lens),
        max_seqlen_k=max(case.seq_lens),
        out=batch.out,
        softmax_scale=case.softmax_scale,
        **features_of(batch),
        lse=batch.lse,
        plan=plan,
    )
    if (changed := num_different(before, batch.kv_store)) > 0:
        raise PoisonError(
            f"P4: {changed} elements of the KV pool or its canaries changed; attention may change 0. {case}"
        )
    around = batch.out_store.clone()
    out_view(around, batch.problem, case.out_view).fill_(math.nan)
    if (changed := num_different(around, torch.full_like(around, math.nan))) > 0:
        raise PoisonError(f"P4: {changed} elements around the output were written; the limit is 0. {case}")
    return batch.out.clone(memory_format=torch.contiguous_format)


def judge(
    batch: Batch, out: torch.Tensor, wanted: torch.Tensor, wanted_lse: torch.Tensor | None, tolerance: float
) -> Report:
    """P1, and the error against another answer.

    Args:
        out: of ``run_poisoned``, whose log-sum-exps are the batch's.
        wanted, wanted_lse: float64, of the same shapes; ``wanted`` is zero where ``out`` must be.

    Raises:
        PoisonError: a rule was broken.
    """
    case = batch.case
    where = f"{batch.problem}; {case}"
    empty_T = (wanted == 0).flatten(1).all(1)
    if (bad := int((~out.isfinite()).sum())) > 0:
        rows = (~out.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
        raise PoisonError(
            f"P1: {bad} of {out.numel()} output elements are not finite, in rows {rows[:8]}; the limit is 0. {where}"
        )
    if (bad := int((out[empty_T] != 0).sum())) > 0:
        raise PoisonError(f"P1: {bad} elements of padding rows or rows without keys are not 0; the limit is 0. {where}")
    if batch.lse is not None and wanted_lse is not None:
        num_tokens = sum(case.query_lens)
        _judge_lse(batch.lse[:, :num_tokens], wanted_lse[:, :num_tokens], where)
    report = worst_request(case, out, wanted, tolerance)
    if not report.error <= tolerance:
        raise PoisonError(f"error: {report}. {where}")
    return report


def reference(batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and log-sum-exps in float64. Unwritten slots must hold finite numbers: it multiplies what it masks."""
    lse = None if batch.lse is None else torch.empty_like(batch.lse, dtype=torch.float64)
    out = paged_attention_reference(
        batch.q,
        batch.kv_cache,
        batch.block_table,
        batch.cu_seqlens_q,
        batch.seq_lens,
        softmax_scale=batch.case.softmax_scale,
        **features_of(batch),
        lse=lse,
    )
    return out, lse


def worst_request(case: Case, out: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> Report:
    """The request whose rows are furthest from what is wanted."""
    worst, request, start = 0.0, 0, 0
    for index, length in enumerate(case.query_lens):
        error = relative_rms(out[start : start + length], wanted[start : start + length])
        start += length
        if error > worst or math.isnan(error):
            worst, request = error, index
    return Report(error=worst, tolerance=tolerance, request=request)


def features_of(batch: Batch) -> dict[str, Any]:
    """The arguments of ``paged_attention`` and its reference that a problem's features ask for."""
    problem = batch.problem
    return {"causal": problem.causal, "window": problem.window, "soft_cap": problem.soft_cap, **batch.extras}


def _judge_lse(got: torch.Tensor, wanted: torch.Tensor, where: str) -> None:
    empty = wanted == -math.inf
    if (bad := int((empty != (got == -math.inf)).sum())) > 0:
        raise PoisonError(f"P1: {bad} log-sum-exps are -inf and should not be, or the reverse; the limit is 0. {where}")
    error = float((got.double() - wanted)[~empty].abs().max()) if bool((~empty).any()) else 0.0
    if not error <= LSE_TOLERANCE:
        raise PoisonError(f"error: log-sum-exp off by {error:.2e} (limit {LSE_TOLERANCE:.0e}). {where}")


def check_same_bits(
    batch: Batch, first: torch.Tensor, again: torch.Tensor, rule: str, what: str, requests: range | None = None
) -> None:
    """Bit equality, of all rows or of those of some requests."""
    start = 0
    for request, length in enumerate(batch.case.query_lens):
        rows = slice(start, start + length)
        start += length
        if requests is not None and request not in requests:
            continue
        if (changed := num_different(first[rows], again[rows])) > 0:
            raise PoisonError(
                f"{rule}: {changed} output elements of request {request} changed when {what}; the limit is 0. "
                f"{batch.case}"
            )
    if num_different(first[start:], again[start:]) > 0:
        raise PoisonError(f"{rule}: padding rows changed when {what}; they must stay 0. {batch.case}")


def num_different(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements whose bits differ; NaN equals itself."""
    kind = BITS[a.element_size()]
    return int((a.contiguous().view(kind) != b.contiguous().view(kind)).sum())


def _another(problem: AttentionProblem, case: Case, device: torch.device) -> Batch:
    """A small batch of another shape that asks for no kernel that ``case`` does not ask for."""
    lens = [(1, 2)] * case.has_decode + [(3, 19)] * case.has_prefill or [(0, 0)]
    query_lens, seq_lens = zip(*lens, strict=True)
    other = make_batch(problem, Case(query_lens=query_lens, seq_lens=seq_lens, padding_rows=1), device, seed=99)
    other.poison(math.nan, "stale")
    return other


def _grow_scratch(workspace: AttentionWorkspace) -> None:
    for name in ("partial_o", "partial_lse"):
        scratch: torch.Tensor = getattr(workspace, name)
        size = (len(scratch) + SCRATCH_CANARIES, *scratch.shape[1:])
        setattr(workspace, name, torch.full(size, math.nan, dtype=scratch.dtype, device=scratch.device))


def _check_scratch(batch: Batch, workspace: AttentionWorkspace, used: int) -> None:
    """Nothing is written past the rows that may be used."""
    for name in ("partial_o", "partial_lse"):
        written = int((~getattr(workspace, name)[used:].isnan()).sum())
        if written > 0:
            raise PoisonError(
                f"P4: {written} elements of {name} past its {used} pieces were written; the limit is 0. {batch.case}"
            )
