"""How the poison harness calls attention: a plan, a batch's arguments, an output that starts as NaN.

What the harness checks is in ``testing/poison.py``, how an answer is judged in ``testing/poison_judge.py``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from tl_backend.configs import decode as decode_config
from tl_backend.ops import AttentionPlan, AttentionWorkspace, plan_attention
from tl_backend.ops.reference import paged_attention_reference
from tl_backend.testing.cases import Batch
from tl_backend.testing.poison_judge import PoisonError, num_different
from tl_backend.testing.views import out_view

Attention = Callable[..., torch.Tensor]


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


def features_of(batch: Batch) -> dict[str, Any]:
    """The arguments of ``paged_attention`` and its reference that a problem's features ask for."""
    problem = batch.problem
    return {"causal": problem.causal, "window": problem.window, "soft_cap": problem.soft_cap, **batch.extras}
