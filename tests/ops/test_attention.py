"""``paged_attention`` as a whole: routes, bounds, plans, and what it returns."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from tl_backend.ops import AttentionWorkspace, paged_attention
from tl_backend.ops.reference import paged_attention_reference
from tl_backend.telemetry import launches
from tl_backend.testing.cases import Batch, Case, make_batch, make_problem
from tl_backend.testing.poison import check_attention
from tl_backend.testing.poison_judge import num_different, relative_rms
from tl_backend.testing.poison_run import forced_splits, make_plan

CPU = torch.device("cpu")
SMALL = make_problem(8, 2, 64, 16)
MIXED = Case(query_lens=(1, 0, 1, 37, 1, 4), seq_lens=(130, 0, 1, 50, 66, 4))


def run(batch: Batch, **changes: Any) -> torch.Tensor:
    case = batch.case
    return paged_attention(
        batch.q,
        batch.kv_cache,
        batch.block_table,
        batch.cu_seqlens_q,
        batch.seq_lens,
        **{
            "max_seqlen_q": max(case.query_lens, default=0),
            "max_seqlen_k": max(case.seq_lens, default=0),
            "causal": batch.problem.causal,
            **changes,
        },
    )


def ready(problem, case: Case) -> Batch:
    batch = make_batch(problem, case, CPU)
    batch.poison(math.nan, -1)
    return batch


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()
    monkeypatch.setattr(launches, "record", lambda kernel, source="": counts.update([kernel]))
    return counts


@pytest.mark.parametrize("num_splits", [None, 1, 2, 3, 8])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_decodes_and_prefills_in_one_batch(num_splits: int | None, causal: bool) -> None:
    """A decode after the first prefill, requests without a query or keys, padding rows."""
    problem = make_problem(8, 2, 64, 16, causal=causal)
    check_attention(problem, Case(**{**vars(MIXED), "num_splits": num_splits}), CPU)


def test_chunked_mix_of_a_model_with_40_heads() -> None:
    """CASES.md, the table's last row, its long lengths shortened."""
    case = Case(query_lens=(1, 1, 5, 64, 0, 1), seq_lens=(1, 17, 5, 300, 0, 1030))
    check_attention(make_problem(40, 8, 96, 16), case, CPU)


@pytest.mark.parametrize("page_size", [528, 4192])
def test_page_sizes_of_hybrid_models(page_size: int) -> None:
    """CASES.md B13; 272, 544 and 4352 are in the sweeps. Tiles of 32 keys cross a page's end in 272 and 528 only."""
    case = Case(query_lens=(1, 5), seq_lens=(page_size + 3, 2 * page_size - 1))
    check_attention(make_problem(4, 2, 32, page_size), case, CPU)


@pytest.mark.parametrize("query_lens", [(0, 0), (0,), ()], ids=str)
def test_no_query_at_all(query_lens: tuple[int, ...], counted: Counter[str]) -> None:
    """CASES.md A11: all of a batch is padding."""
    batch = make_batch(SMALL, Case(query_lens=query_lens, seq_lens=(0,) * len(query_lens)), CPU) if query_lens else None
    if batch is None:
        empty = torch.zeros(0, dtype=torch.int32)
        q, kv_cache = torch.full((3, 8, 64), math.nan), torch.zeros(2, 2, 16, 128)
        out = paged_attention(
            q, kv_cache, empty.reshape(0, 4), torch.zeros(1).int(), empty, max_seqlen_q=0, max_seqlen_k=0
        )
    else:
        out = run(batch)
    assert out.shape == (3, 8, 64)
    assert not out.any()
    assert not counted


def test_no_row_at_all() -> None:
    batch = ready(SMALL, Case(query_lens=(0, 0), seq_lens=(5, 0), padding_rows=0))
    assert run(batch).shape == (0, 8, 64)


@pytest.mark.parametrize(
    ("query_lens", "num_splits", "wanted"),
    [
        ((1, 1), 1, {"decode": 1}),
        ((1, 0, 1), 4, {"decode": 1, "decode_combine": 1}),
        ((2, 5), 1, {"prefill": 1}),
        ((2, 1), 1, {"prefill": 1}),
        ((1, 2), 1, {"decode": 1, "prefill": 1}),
        ((0, 2), 1, {"prefill": 1}),
        ((0, 0, 1, 0, 7, 1), 2, {"decode": 1, "decode_combine": 1, "prefill": 1}),
    ],
)
def test_leading_single_queries_are_decoded_and_the_rest_is_prefilled(query_lens, num_splits, wanted, counted) -> None:
    with forced_splits(num_splits):
        run(ready(SMALL, Case(query_lens=query_lens, seq_lens=tuple(9 + n for n in query_lens))))
    assert counted == wanted


def test_num_splits_caps_the_pieces(counted: Counter[str]) -> None:
    batch = ready(SMALL, Case(query_lens=(1,), seq_lens=(300,)))
    with forced_splits(8):
        workspace = AttentionWorkspace(SMALL, CPU, max_num_reqs=1, max_num_tokens=1)
        assert [make_plan(batch, workspace, num_splits=cap).decode.num_splits for cap in (None, 3, 1, 99)] == [
            8,
            3,
            1,
            8,
        ]
        run(batch, num_splits=1)
    assert counted == {"decode": 1}


def test_upper_bounds_of_the_lengths_change_no_bit() -> None:
    for case in (MIXED, Case(query_lens=(1, 1), seq_lens=(40, 7))):
        batch = ready(SMALL, case)
        assert num_different(run(batch), run(batch, max_seqlen_q=4096, max_seqlen_k=100_000)) == 0


def test_the_output_is_made_if_not_given() -> None:
    batch = ready(SMALL, MIXED)
    out = run(batch)
    given = torch.full_like(out, math.nan)
    assert run(batch, out=given) is given
    assert num_different(out, given) == 0
    assert out.shape == batch.q.shape
    assert out.dtype == torch.float32


def test_the_default_scale_is_that_of_the_head_size() -> None:
    batch = ready(SMALL, MIXED)
    assert num_different(run(batch), run(batch, softmax_scale=64**-0.5)) == 0
    assert num_different(run(batch), run(batch, softmax_scale=0.5 * 64**-0.5)) > 0


def test_logits_beyond_the_range_of_float16() -> None:
    """CASES.md A40: all logits are 256 * 256 * 64 = 4e6, and one row's are -6e4 to all keys: each is the mean of V."""
    batch = ready(SMALL, Case(query_lens=(4,), seq_lens=(40,)))
    batch.q[:4] = 256.0
    batch.q[2] = -256.0
    batch.kv_SHD[..., :64] = 256.0
    batch.poison(math.nan, -1)
    got = run(batch, softmax_scale=1.0)
    wanted = paged_attention_reference(
        batch.q, batch.kv_cache, batch.block_table, batch.cu_seqlens_q, batch.seq_lens, softmax_scale=1.0
    )
    assert relative_rms(got[:4], wanted[:4]) <= 1e-5


def test_one_plan_serves_layers_of_other_layouts() -> None:
    """The layers of a step share a plan; their caches may lie differently."""
    case = Case(query_lens=MIXED.query_lens, seq_lens=MIXED.seq_lens, num_splits=3)
    first = ready(SMALL, case)
    with forced_splits(3):
        workspace = AttentionWorkspace(SMALL, CPU, max_num_reqs=6, max_num_tokens=44)
        plan = make_plan(first, workspace)
        for kv_layout in ("HND", "NHD", "layers"):
            layer = make_batch(SMALL, Case(**{**vars(case), "kv_layout": kv_layout}), CPU, seed=5)
            layer.poison(math.nan, -1)
            assert num_different(run(layer, plan=plan), run(layer)) == 0


def test_a_plan_fixes_the_rows_beyond_which_the_output_is_zero() -> None:
    batch = ready(SMALL, Case(query_lens=(1, 2), seq_lens=(5, 6), padding_rows=9))
    workspace = AttentionWorkspace(SMALL, CPU, max_num_reqs=2, max_num_tokens=3)
    out = torch.full_like(batch.out, math.nan)
    run(batch, plan=make_plan(batch, workspace), out=out)
    assert not out[3:].any()
    assert out[:3].all()
