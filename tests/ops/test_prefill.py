"""Prefill on the C target, under the poison harness, against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from tl_backend.testing.cases import Case, make_problem
from tl_backend.testing.poison import check_attention
from tl_backend.testing.problems import CPU_PROBLEMS, name
from tl_backend.testing.views import KV_LAYOUTS, OUT_VIEWS, Q_VIEWS

CPU = torch.device("cpu")


@pytest.mark.parametrize(("index", "problem"), [*enumerate(CPU_PROBLEMS)], ids=[name(p) for p in CPU_PROBLEMS])
def test_head_sizes_ratios_and_page_sizes(index: int, problem) -> None:
    """Lengths that divide nothing, a query longer than its sequence, requests without queries, keys or both."""
    case = Case(
        query_lens=(5, 40, 0, 33, 2, 4, 3, 0),
        seq_lens=(9, 101, 7, 33, 131, 0, 2, 0),
        kv_layout=KV_LAYOUTS[index % len(KV_LAYOUTS)],
        q_view=Q_VIEWS[index // 2 % len(Q_VIEWS)],
        out_view=OUT_VIEWS[index % len(OUT_VIEWS)],
    )
    check_attention(problem, case, CPU)


@pytest.mark.parametrize("problem", [CPU_PROBLEMS[0], CPU_PROBLEMS[2]], ids=name)
def test_sequences_of_many_and_of_large_pages(problem) -> None:
    check_attention(problem, Case(query_lens=(7, 2), seq_lens=(1000, 4361)), CPU)


SMALL = make_problem(8, 2, 64, 16)
RATIOS = {problem.group_size: problem for problem in CPU_PROBLEMS}


@pytest.mark.parametrize(("query_len", "seq_len"), [(1, 2), (3, 128), (16, 129), (127, 128), (64, 4097)], ids=str)
def test_causal_mask_is_aligned_bottom_right(query_len: int, seq_len: int) -> None:
    """CASES.md A17: aligned top-left, a mask is right only where the lengths are equal."""
    check_attention(SMALL, Case(query_lens=(2, query_len), seq_lens=(2, seq_len)), CPU)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_zero_length_queries_at_head_size_256(causal: bool) -> None:
    """CASES.md A10, its lengths divided by eight; tests/gpu has them in full."""
    problem = make_problem(4, 1, 256, 16, causal=causal)
    check_attention(problem, Case(query_lens=(0, 151, 105, 0), seq_lens=(318, 218, 105, 384)), CPU)


@pytest.mark.parametrize("ratio", [3, 5, 6, 7, 9, 11, 12, 13, 15])
def test_ratios_that_are_no_power_of_two(ratio: int) -> None:
    """CASES.md A19: 16 // 5 = 3 tokens of 5 heads fill 15 of 16 rows."""
    check_attention(RATIOS[ratio], Case(query_lens=(2, 1, 3, 5, 17, 1), seq_lens=(2, 30, 40, 5, 50, 1)), CPU)


@pytest.mark.parametrize("ratio", [17, 24, 32, 48, 64, 71])
def test_many_queries_of_one_kv_head(ratio: int) -> None:
    """CASES.md A18: 16 // ratio is 0."""
    check_attention(RATIOS[ratio], Case(query_lens=(2, 33, 1), seq_lens=(3, 300, 1)), CPU)


def test_a_few_tokens_of_every_request() -> None:
    """CASES.md B9: steps of speculative decoding, where a longest query of 1 is an error to take for granted."""
    check_attention(SMALL, Case(query_lens=(4, 4, 4, 4), seq_lens=(4, 37, 128, 301)), CPU)


@pytest.mark.parametrize("kv_layout", KV_LAYOUTS)
@pytest.mark.parametrize("q_view", Q_VIEWS)
def test_every_layout_with_every_query_view(kv_layout, q_view) -> None:
    check_attention(SMALL, Case(query_lens=(3, 18), seq_lens=(40, 18), kv_layout=kv_layout, q_view=q_view), CPU)


@pytest.mark.parametrize("out_view", OUT_VIEWS)
def test_every_output_view(out_view) -> None:
    check_attention(SMALL, Case(query_lens=(3, 18), seq_lens=(40, 18), out_view=out_view), CPU)


@pytest.mark.parametrize("num_q_heads", [1, 4])
def test_extents_of_one_with_meaningless_strides(num_q_heads: int) -> None:
    """CASES.md A25, A26: one query head, one kv head, one request (every batch here has odd strides for those)."""
    check_attention(make_problem(num_q_heads, 1, 32, 16), Case(query_lens=(5,), seq_lens=(9,), padding_rows=0), CPU)


@pytest.mark.parametrize("scale", [1e-3, 0.5, 1.0])
def test_softmax_scale(scale: float) -> None:
    check_attention(SMALL, Case(query_lens=(6, 2), seq_lens=(33, 70), softmax_scale=scale), CPU)


def test_no_padding_and_much_of_it() -> None:
    for padding in (0, 100):
        check_attention(SMALL, Case(query_lens=(6,), seq_lens=(33,), padding_rows=padding), CPU)
