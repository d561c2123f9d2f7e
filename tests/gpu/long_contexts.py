"""Checks of contexts and logits that are large, of the kind that ``extremes`` lists.

Every check raises an AssertionError, or returns its relative RMS. ``limit`` is ``INT32_LIMIT`` on a GPU; with a smaller
one a check takes fewer or smaller sizes, for a dry run of the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tl_backend.ops import AttentionWorkspace, paged_attention, plan_attention
from tl_backend.ops.reference import paged_attention_reference
from tl_backend.problem import AttentionProblem
from tl_backend.testing.cases import Case, make_batch, make_problem
from tl_backend.testing.poison import check_attention
from tl_backend.testing.poison_judge import TOLERANCES, relative_rms
from tl_backend.testing.poison_run import features_of, forced_splits

INT32_LIMIT = 2**31
ALIBI_KEYS = 32768


@dataclass(frozen=True, kw_only=True)
class Extreme:
    """Attributes: kinds: kernels that it needs, as in ``problems.Work``; check: runs it and returns its error."""

    name: str
    problem: AttentionProblem
    kinds: tuple[str, ...]
    check: Callable[[AttentionProblem, torch.device, int], float]
    gpu_only: bool = False


def context_extremes(dtype: str) -> list[Extreme]:
    """The checks of this file but A4, for one dtype."""
    # Problems whose kernels the sweep compiles anyway. ALiBi and A40 in float16, which their logits leave.
    half = "float32" if dtype == "float32" else "float16"
    twelve = {"num_q_heads": 12, "num_kv_heads": 1, "head_dim": 80, "page_size": 48}
    sinks = {
        "model's": make_problem(64, 8, 64, 64, dtype=dtype, sinks_dtype=dtype),
        "8-bit": make_problem(**twelve, dtype=dtype, kv_dtype="float8_e4m3fn", window=100, sinks_dtype="float32"),
    }
    served = ("prefill", "decode")
    return [
        Extreme(
            name="A12 A39 every context length",
            problem=make_problem(32, 8, 128, 16, dtype=dtype),
            kinds=("decode", "decode_split"),
            check=every_context_length,
        ),
        Extreme(
            name="A27 a window at its edge",
            problem=make_problem(**twelve, dtype=half, window=1000, soft_cap=2.0),
            kinds=served,
            check=window_at_its_edge,
        ),
        *(
            Extreme(
                name=f"A32 sinks far from the logits, {cache} cache",
                problem=problem,
                kinds=served,
                check=sinks_far_from_the_logits,
            )
            for cache, problem in sinks.items()
        ),
        Extreme(
            name="A33 ALiBi at 32768 keys",
            problem=make_problem(**twelve, dtype=half, has_alibi=True),
            kinds=served,
            check=alibi_side_by_side,
        ),
        Extreme(
            name="A40 logits beyond float16",
            problem=make_problem(24, 2, 144, 48, dtype=half),
            kinds=served,
            check=logits_beyond_float16,
        ),
    ]


def long_context(seq_len: int) -> Callable[[AttentionProblem, torch.device, int], float]:
    """CASES.md A4."""

    def check(problem: AttentionProblem, device: torch.device, limit: int) -> float:
        keys = seq_len if limit == INT32_LIMIT else seq_len % 1000
        lens = (64, keys) if limit == INT32_LIMIT else (6, keys)
        one = check_attention(problem, Case(query_lens=lens[:1], seq_lens=lens[1:]), device)
        other = check_attention(problem, Case(query_lens=(1,), seq_lens=lens[1:], num_splits=16), device)
        return max(one.error, other.error)

    return check


def every_context_length(problem: AttentionProblem, device: torch.device, limit: int) -> float:
    """CASES.md A12, A39: one query and each number of keys, in as many pieces as the plan chooses; scratch is NaN."""
    lengths = [1, 15, 16, 17, 100, 130]
    if limit == INT32_LIMIT:
        lengths = [*range(1, 2050), *range(2111, 8192, 61), 4095, 4096, 4097, 8191, 8192, 8193]
    generator = torch.Generator(device).manual_seed(0)
    dtype, page = getattr(torch, problem.dtype), problem.page_size
    num_blocks = -(-max(lengths) // page)
    shape = (num_blocks, problem.num_kv_heads, page, 2 * problem.head_dim)
    kv_cache = torch.randn(shape, generator=generator, device=device).to(dtype)
    q = 2 * torch.randn(1, problem.num_q_heads, problem.head_dim, generator=generator, device=device).to(dtype)
    table = torch.arange(num_blocks, dtype=torch.int32, device=device)[None]
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    workspace = AttentionWorkspace(problem, device, max_num_reqs=1, max_num_tokens=1)
    worst = 0.0
    for length in lengths:
        workspace.partial_o.fill_(torch.nan)
        workspace.partial_lse.fill_(torch.nan)
        seq_lens = torch.tensor([length], dtype=torch.int32, device=device)
        bounds = {"max_seqlen_q": 1, "max_seqlen_k": length}
        plan = plan_attention(problem, starts, seq_lens, cu_seqlens_q_cpu=starts.cpu(), workspace=workspace, **bounds)
        got = paged_attention(q, kv_cache, table, starts, seq_lens, plan=plan, **bounds)
        error = relative_rms(got, paged_attention_reference(q, kv_cache, table, starts, seq_lens))
        assert error <= TOLERANCES[problem.dtype], f"relative RMS {error:.2e} at {length} keys"
        worst = max(worst, error)
    return worst


def window_at_its_edge(problem: AttentionProblem, device: torch.device, limit: int) -> float:
    """CASES.md A27: contexts just below a window, at it and beyond, decoded and prefilled."""
    window = problem.window or 0
    seq_lens = (window - 1, window, window + 1, 2 * window - 1)
    one = check_attention(problem, Case(query_lens=(1,) * 4, seq_lens=seq_lens, num_splits=1), device)
    other = check_attention(problem, Case(query_lens=(3, 70, 3, 70), seq_lens=seq_lens), device)
    return max(one.error, other.error)


def sinks_far_from_the_logits(problem: AttentionProblem, device: torch.device, limit: int) -> float:
    """CASES.md A32: decoded and prefilled. A sink of 80 leaves outputs of 1e-32."""
    lens = {"query_lens": (1, 0, 1, 1, 20, 2), "seq_lens": (300, 9, 1, 0, 100, 3)}
    cases = [Case(**lens, sinks=(sink,), num_splits=1) for sink in (-1e4, 0.0, 10.0, 80.0)]
    return max(check_attention(problem, case, device).error for case in cases)


def alibi_side_by_side(problem: AttentionProblem, device: torch.device, limit: int) -> float:
    """CASES.md A33: the same token is decoded and, behind another, prefilled; in a dry run, too."""
    case = Case(query_lens=(1, 2), seq_lens=(ALIBI_KEYS, ALIBI_KEYS))
    batch = make_batch(problem, case, device)
    # Of 12 heads: those of 8, then every second one of 16.
    exponents = [*range(1, 9), *(0.5 + n for n in range(4))]
    batch.extras["alibi_slopes"] = torch.tensor([2.0**-n for n in exponents], device=device)
    batch.poison(torch.nan, -1)
    batch.block_table[1] = batch.block_table[0]
    batch.q[2] = batch.q[0]
    rest = (batch.q, batch.kv_cache, batch.block_table, batch.cu_seqlens_q, batch.seq_lens)
    features = features_of(batch)
    wanted = paged_attention_reference(*rest, **features)
    with forced_splits(1):
        got = paged_attention(*rest, max_seqlen_q=2, max_seqlen_k=ALIBI_KEYS, **features)
    apart = relative_rms(got[0], got[2].double())
    assert apart <= TOLERANCES[problem.dtype], f"decode and prefill of one token are {apart:.2e} apart"
    return max(relative_rms(got[row], wanted[row]) for row in range(3))


def logits_beyond_float16(problem: AttentionProblem, device: torch.device, limit: int) -> float:
    """CASES.md A40: all logits of a row are 256 * 256 * D, of one row their negative: each output is the mean of V."""
    batch = make_batch(problem, Case(query_lens=(1, 4), seq_lens=(40, 40), num_splits=1), device)
    batch.q[:5] = 256.0
    batch.q[2] = -256.0
    batch.kv_SHD[..., : problem.head_dim] = 256.0
    batch.poison(torch.nan, -1)
    rest = (batch.q, batch.kv_cache, batch.block_table, batch.cu_seqlens_q, batch.seq_lens)
    with forced_splits(1):
        got = paged_attention(*rest, max_seqlen_q=4, max_seqlen_k=40, softmax_scale=1.0)
    assert got.isfinite().all(), "an output is not finite"
    return relative_rms(got[:5], paged_attention_reference(*rest, softmax_scale=1.0)[:5])
