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
row among a thousand right ones must show. How that is judged is in ``testing/poison_judge.py``, how attention is
called in ``testing/poison_run.py``; the cache write has ``testing/poison_writes.py``.
"""

from __future__ import annotations

import math

import torch

from tl_backend.ops import AttentionWorkspace, paged_attention
from tl_backend.problem import AttentionProblem
from tl_backend.testing.cases import Batch, Case, Tail, make_batch
from tl_backend.testing.poison_judge import TOLERANCES, PoisonError, Report, check_same_bits, judge
from tl_backend.testing.poison_run import Attention, forced_splits, make_plan, reference, run_poisoned

SCRATCH_CANARIES = 4  # Partial results after those that a plan may use.
FAR = 1000  # Keys that a bound may have too many: several tiles.
LARGE = 6e4  # Near the end of float16's range; an 8-bit cache takes its largest number.


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
