"""Attention over contiguous keys and values on the C target, under the poison harness; and its refusals."""

import math

import pytest
import torch

from tl_backend.errors import InvalidInputError, UnsupportedError
from tl_backend.ops import AttentionWorkspace, plan_attention, varlen_attention
from tl_backend.testing.cases import Case, make_problem
from tl_backend.testing.contiguous import check_varlen

CPU = torch.device("cpu")
MIXED = Case(query_lens=(1, 0, 40, 7, 129, 2), seq_lens=(300, 9, 100, 7, 129, 1), q_view="padded", padding_rows=2)
ENCODER = Case(query_lens=(33, 1, 0, 64, 100), seq_lens=(33, 1, 0, 64, 100), out_view="padded")
PROBLEMS = {
    "encoder": make_problem(12, 12, 64, None, causal=False),
    "encoder, GQA 7": make_problem(14, 2, 32, None, causal=False),
    "causal": make_problem(6, 2, 80, None),
    "71 heads on one": make_problem(71, 1, 48, None),
    "head size 512": make_problem(4, 2, 512, None, causal=False),
    "window and cap": make_problem(4, 2, 32, None, window=50, soft_cap=2.0),
    "window, not causal": make_problem(4, 4, 48, None, causal=False, window=33),
    "sinks, ALiBi, log-sum-exp": make_problem(
        6, 2, 32, None, causal=False, sinks_dtype="float32", has_alibi=True, returns_lse=True
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_under_poison(name: str) -> None:
    check_varlen(PROBLEMS[name], MIXED, CPU)
    check_varlen(PROBLEMS[name], ENCODER, CPU)


def given(**change):
    tensors = {
        "q": torch.zeros(5, 4, 32),
        "k": torch.zeros(9, 2, 32),
        "v": torch.zeros(9, 2, 32),
        "cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 4, 9], dtype=torch.int32),
        "max_seqlen_q": 3,
        "max_seqlen_k": 5,
    }
    return tensors | change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.zeros(9, 3, 32)}, InvalidInputError, "v shape"),
        (
            {"k": torch.zeros(9, 3, 32), "v": torch.zeros(9, 3, 32)},
            InvalidInputError,
            "head counts: got 4 q heads, 3 kv",
        ),
        ({"k": torch.zeros(9, 2, 64)}, InvalidInputError, r"k shape: got \[9, 2, 64\]"),
        ({"v": torch.zeros(9, 2, 32).half()}, InvalidInputError, "v dtype: got float16; k has float32"),
        (
            dict.fromkeys(("k", "v"), torch.zeros(9, 2, 32).to(torch.float8_e4m3fn)),
            UnsupportedError,
            "dtype of keys and values: got float8_e4m3fn; .* only a cache may be 8-bit",
        ),
        ({"causal": torch.tensor([True, False])}, UnsupportedError, "causal: got a tensor"),
        (dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.zeros(0).int()), InvalidInputError, "got no element"),
        ({"out": torch.zeros(5, 1, 32).expand(5, 4, 32)}, InvalidInputError, r"out strides: got \(32, 0, 1\)"),
        ({"lse": torch.zeros(1, 5).expand(4, 5)}, InvalidInputError, r"lse strides: got \(0, 1\)"),
        ({"k": torch.zeros(9, 2, 32).half()}, UnsupportedError, "dtype of keys and values: got float16"),
        ({"cu_seqlens_k": torch.tensor([0, 9], dtype=torch.int32)}, InvalidInputError, "cu_seqlens_k shape"),
        (
            {"cu_seqlens_k": torch.tensor([0, 4, 10], dtype=torch.int32)},
            InvalidInputError,
            "cu_seqlens_k: got 0 ... 10",
        ),
        ({"cu_seqlens_k": torch.tensor([0, 4, 3], dtype=torch.int32)}, InvalidInputError, "shortest step -1"),
        ({"max_seqlen_k": 4}, InvalidInputError, "max_seqlen_k: got 4"),
        ({"softmax_scale": 0.0}, InvalidInputError, "softmax_scale: got 0.0"),
    ],
)
def test_malformed(change, error, message) -> None:
    with pytest.raises(error, match=message):
        varlen_attention(**given(**change))


def test_no_request() -> None:
    none = torch.zeros(1, dtype=torch.int32)
    out = torch.full((5, 4, 32), math.nan)
    varlen_attention(**given(cu_seqlens_q=none, cu_seqlens_k=none, out=out))
    assert (out == 0).all()


def test_a_plan_of_a_paged_problem_is_refused() -> None:
    problem = make_problem(4, 2, 32, 16)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    plan = plan_attention(
        problem, starts, torch.tensor([4, 5]).int(), cu_seqlens_q_cpu=starts, max_seqlen_q=3, max_seqlen_k=5,
        workspace=AttentionWorkspace(problem, CPU, max_num_reqs=2, max_num_tokens=5),
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="causal: got a tensor"):
        varlen_attention(**given(plan=plan, causal=torch.tensor([True, False])))
    with pytest.raises(InvalidInputError, match=r"the plan was made for \('float32', 4, 32, 2, 16\)"):
        varlen_attention(**given(plan=plan))
