"""Checks of what holds between several calls, of the kind that ``extremes`` lists."""

from __future__ import annotations

import torch

from tests.gpu.long_contexts import Extreme
from tl_backend.ops import merge_attention, varlen_attention
from tl_backend.ops.reference import varlen_attention_reference
from tl_backend.problem import AttentionProblem
from tl_backend.testing.cases import make_problem
from tl_backend.testing.invariance import check_batch_invariance
from tl_backend.testing.poison_judge import relative_rms


def property_extremes(dtype: str) -> list[Extreme]:
    """The checks of this file."""
    invariant = (
        make_problem(32, 8, 128, 16, dtype=dtype),
        make_problem(32, 8, 128, 128, dtype=dtype),
        make_problem(28, 4, 128, 16, dtype=dtype, window=100),
    )
    found = [
        Extreme(name="bits depend on the request alone", problem=problem, kinds=("prefill",), check=batch_invariance)
        for problem in invariant
    ]
    contiguous = make_problem(32, 8, 128, None, dtype=dtype, causal=False, returns_lse=True)
    return [
        *found,
        Extreme(name="A37 two halves of the keys", problem=contiguous, kinds=("prefill", "merge"), check=merged_halves),
    ]


def batch_invariance(problem: AttentionProblem, device: torch.device, limit: int) -> float:
    """The request alone, in a batch, in chunks: the same bits."""
    check_batch_invariance(problem, min(1500, limit // 256), device)
    return 0.0


def merged_halves(problem: AttentionProblem, device: torch.device, limit: int) -> float:
    """Requests whose keys are cut in two, of which some have all keys in one part, and one has none."""
    del limit
    dtype = getattr(torch, problem.dtype)
    generator = torch.Generator(device).manual_seed(0)
    query_lens, halves = (130, 7, 40, 3), ((700, 0, 33, 0), (257, 129, 0, 0))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    def starts(lens: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0, *lens], device=device).cumsum(0).int()

    q = 2 * randn(sum(query_lens), problem.num_q_heads, problem.head_dim)
    kv = [randn(sum(lens), 2 * problem.num_kv_heads, problem.head_dim) for lens in halves]
    parts = []
    for lens, rows in zip(halves, kv, strict=True):
        lse = torch.empty(problem.num_q_heads, len(q), device=device)
        k, v = rows.chunk(2, dim=1)
        out = varlen_attention(
            q, k, v, starts(query_lens), starts(lens),
            max_seqlen_q=max(query_lens), max_seqlen_k=max(lens), causal=problem.causal, lse=lse,
        )  # fmt: skip
        parts += [out, lse]
    lse = torch.empty_like(parts[1])
    merged = merge_attention(*parts, lse=lse)
    pieces = [rows.split(list(lens)) for lens, rows in zip(halves, kv, strict=True)]
    k, v = torch.cat([part for pair in zip(*pieces, strict=True) for part in pair]).chunk(2, dim=1)
    whole = starts(tuple(a + b for a, b in zip(*halves, strict=True)))
    wanted_lse = torch.empty(lse.shape, dtype=torch.float64, device=device)
    wanted = varlen_attention_reference(
        q, k, v, starts(query_lens), whole, causal=problem.causal, lse=wanted_lse
    )  # fmt: skip
    empty = wanted_lse == -torch.inf
    assert torch.equal(empty, lse == -torch.inf), "log-sum-exps are -inf where they should not be, or the reverse"
    error = float((lse.double() - wanted_lse)[~empty].abs().max())
    assert error <= 1e-4, f"log-sum-exp off by {error:.2e} (limit 1e-4)"
    return relative_rms(merged, wanted)
