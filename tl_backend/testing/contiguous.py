"""The poison harness for ``varlen_attention``: batches of the paged harness, their keys and values laid out in rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from tl_backend.ops import AttentionPlan, varlen_attention
from tl_backend.problem import PAGE_SIZE_STEP, AttentionProblem
from tl_backend.testing.cases import Case
from tl_backend.testing.poison import check_attention
from tl_backend.testing.poison_judge import Report
from tl_backend.testing.views import odd_strides

SPARE_ROWS = 5  # Before the first request's keys and after the last one's: NaN.


def check_varlen(problem: AttentionProblem, case: Case, device: torch.device) -> Report:
    """Run ``varlen_attention`` under the rules of ``check_attention``.

    Keys and values are slices of one fused buffer that is NaN wherever the pool of the paged batch is poison: around
    the requests, in other requests' rows, before their windows.

    Args:
        problem: of contiguous keys and values.

    Raises:
        PoisonError: a rule was broken.
    """
    paged = replace(problem, page_size=PAGE_SIZE_STEP)

    def operation(
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        max_seqlen_q: int,
        max_seqlen_k: int,
        plan: AttentionPlan | None,
        **options: Any,
    ) -> torch.Tensor:
        k, v, starts = _rows(kv_cache, block_table, seq_lens)
        return varlen_attention(
            q, k, v, cu_seqlens_q, starts,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, plan=plan, **options,
        )  # fmt: skip

    return check_attention(paged, case, device, operation=operation, planned=problem)


def _rows(
    kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values ``[S, HK, D]`` of all requests, and where each request's start; rows around them are NaN."""
    lens = seq_lens.tolist()
    page_size, width = kv_cache.shape[2], kv_cache.shape[3]
    buffer = kv_cache.new_full((sum(lens) + SPARE_ROWS, kv_cache.shape[1], width), math.nan)
    first = 0
    for request, length in enumerate(lens):
        position = torch.arange(length, device=kv_cache.device)
        pages = block_table[request].long()[position // page_size]
        buffer[first : first + length] = kv_cache[pages, :, position % page_size]
        first += length
    k, v = buffer.split(width // 2, dim=-1)
    starts = torch.tensor([0, *lens]).cumsum(0).int().to(kv_cache.device)
    return odd_strides(k), odd_strides(v), starts
