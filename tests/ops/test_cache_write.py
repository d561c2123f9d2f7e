"""The cache write on the C target: every bit of the pool and its canaries against the reference's."""

from __future__ import annotations

import pytest
import torch

from tl_backend.ops import paged_attention, paged_cache_write
from tl_backend.ops.cache_write import cache_write_problem
from tl_backend.ops.reference import paged_attention_reference
from tl_backend.problem import FLOAT8_DTYPES
from tl_backend.telemetry import launches
from tl_backend.testing.cases import make_problem
from tl_backend.testing.poison import relative_rms
from tl_backend.testing.poison_writes import check_cache_write
from tl_backend.testing.problems import CPU_PROBLEMS, name
from tl_backend.testing.views import KV_LAYOUTS, kv_pool

CPU = torch.device("cpu")
SMALL = make_problem(8, 2, 64, 16)


@pytest.mark.parametrize(("index", "problem"), [*enumerate(CPU_PROBLEMS)], ids=[name(p) for p in CPU_PROBLEMS])
def test_head_sizes_and_page_sizes(index: int, problem) -> None:
    """Rows of the first, an inner and the last block; both ends of each; more tokens than one thread block copies."""
    page = problem.page_size
    slots = [0, page - 1, page, 3 * page + 7, 5 * page - 1, -1, *range(2 * page, 2 * page + 14)]
    check_cache_write(problem, slots, CPU, kv_layout=KV_LAYOUTS[index % len(KV_LAYOUTS)])


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8, 32])
@pytest.mark.parametrize("kv_layout", KV_LAYOUTS)
def test_every_layout_with_head_counts(kv_layout, num_kv_heads: int) -> None:
    check_cache_write(make_problem(num_kv_heads, num_kv_heads, 32, 16), [*range(40, 3, -1)], CPU, kv_layout=kv_layout)


@pytest.mark.parametrize(
    "slots",
    [[-1, 5, -1], [-1], [80], [79, 80, 81], [2**40 + 17, 3], [-(2**40)], [2**31, 2**31 + 5], [2**32 + 5, -(2**32) + 5]],
    ids=str,
)
def test_slots_outside_the_pool_are_skipped(slots: list[int]) -> None:
    """CASES.md B11: -1 // 16 = -1 and -1 % 16 = 15 would be the last row of the last block."""
    check_cache_write(SMALL, slots, CPU)


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 80])
def test_numbers_of_tokens(num_tokens: int) -> None:
    check_cache_write(SMALL, torch.randperm(80)[:num_tokens].tolist(), CPU)


def test_no_slot_launches_nothing() -> None:
    before = launches.counts().get("cache_write", 0)
    check_cache_write(SMALL, [], CPU)
    assert launches.counts().get("cache_write", 0) == before


def test_reused_blocks_hold_other_bytes() -> None:
    """CASES.md B15: a block of random bits, NaN and infinity among them; 5 of its 16 slots are written and attended."""
    store, kv_cache = kv_pool(SMALL, 3, "NHD", torch.float32, CPU)
    store.view(torch.int32).random_()
    assert not kv_cache[1].isfinite().all()
    key, value, q = torch.randn(5, 2, 64), torch.randn(5, 2, 64), torch.randn(5, 8, 64)
    paged_cache_write(key, value, kv_cache, torch.arange(16, 21))
    rest = (torch.tensor([[1]]).int(), torch.tensor([0, 5]).int(), torch.tensor([5]).int())
    got = paged_attention(q, kv_cache, *rest, max_seqlen_q=5, max_seqlen_k=5)
    assert relative_rms(got, paged_attention_reference(q, kv_cache, *rest)) <= 1e-5


def test_layers_that_differ_in_queries_share_one_kernel() -> None:
    assert cache_write_problem(make_problem(8, 2, 64, 16)) == cache_write_problem(
        make_problem(14, 2, 64, 16, causal=False)
    )
    assert cache_write_problem(make_problem(8, 2, 64, 16)) != cache_write_problem(make_problem(8, 4, 64, 16))


@pytest.mark.parametrize("kv_dtype", FLOAT8_DTYPES)
def test_8_bit_floats_are_rounded_as_torch_does(kv_dtype: str) -> None:
    """Every value of the format, what lies half way between two, and its neighbours in float32."""
    dtype = getattr(torch, kv_dtype)
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()].unique()
    ties = (values[1:] + values[:-1]) / 2
    near = [torch.nextafter(ties, torch.tensor(way)) for way in (-torch.inf, torch.inf)]
    numbers = torch.cat([values, ties, *near, torch.tensor([-0.0, 1e-30, -1e-30])])
    rows = torch.nn.functional.pad(numbers, (0, -len(numbers) % 32)).view(-1, 1, 32)
    kv_cache = torch.zeros(-(-len(rows) // 16), 1, 16, 64, dtype=torch.uint8).view(dtype)
    one = torch.ones(1)
    paged_cache_write(rows, rows, kv_cache, torch.arange(len(rows)), k_scale=one, v_scale=one)
    stored = kv_cache.view(torch.uint8).view(-1, 64)[: len(rows)]
    wanted = rows.view(-1, 32).to(dtype).view(torch.uint8)
    assert torch.equal(stored, torch.cat([wanted, wanted], dim=1))
