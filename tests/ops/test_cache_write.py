"""The cache write on the C target: every bit of the pool and its canaries against the reference's."""

from __future__ import annotations

import pytest
import torch

from tl_backend.device import DeviceSpec
from tl_backend.errors import TLBackendError
from tl_backend.ops import cache_write, paged_attention, paged_cache_write
from tl_backend.ops.cache_write import cache_write_problem
from tl_backend.ops.reference import paged_attention_reference
from tl_backend.problem import FLOAT8_DTYPES
from tl_backend.telemetry import launches
from tl_backend.testing.cases import make_problem
from tl_backend.testing.poison_judge import relative_rms
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


Launch = tuple[float, ...]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What would have been passed to the kernel on an H200, from no tensor checked before."""
    found: list[Launch] = []
    monkeypatch.setattr(DeviceSpec, "of", classmethod(lambda cls, device: DeviceSpec.absent("sm_90")))
    monkeypatch.setattr(cache_write, "CHECKED", {})
    monkeypatch.setattr(cache_write.KERNELS, "get", lambda key: lambda *arguments: found.append(arguments))
    return found


def layer(dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Keys and values in a fused buffer of five rows, of which three are written."""
    _, key, value = torch.zeros(5, 12, 64, dtype=dtype).split([8, 2, 2], dim=1)
    kv_cache = torch.zeros(4, 2, 16, 128, dtype=kv_dtype or dtype)
    return {"key": key, "value": value, "kv_cache": kv_cache, "slot_mapping": torch.zeros(3, dtype=torch.int64)}


def expected(tensors: dict[str, torch.Tensor], scales: tuple[int, int] = (0, 0)) -> Launch:
    addresses = (tensor.data_ptr() for tensor in tensors.values())
    return (*addresses, *scales, 3, 64, 96, 8, 96, 8, 512, 256, 16)


def test_layers_that_look_alike_are_checked_once(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    checked, check = [], cache_write._checked_problem
    monkeypatch.setattr(cache_write, "_checked_problem", lambda *given: checked.append(given) or check(*given))
    layers = [layer() for _ in range(4)]
    for tensors in layers:
        paged_cache_write(**tensors)
    assert len(checked) == 1
    assert launched == [expected(tensors) for tensors in layers]
    paged_cache_write(**{**layer(), "value": torch.zeros(5, 2, 64, dtype=torch.bfloat16)})
    assert len(checked) == 2
    assert launched[-1][8:12] == (96, 8, 16, 8)


def test_each_layers_scales_are_passed_or_one(launched: list[Launch]) -> None:
    for _ in range(2):
        tensors = layer(torch.bfloat16, torch.float8_e4m3fn)
        k_scale, v_scale = torch.ones(1), torch.tensor(2.0)
        paged_cache_write(**tensors, k_scale=k_scale, v_scale=v_scale)
        assert launched[-1] == expected(tensors, (k_scale.data_ptr(), v_scale.data_ptr()))
    paged_cache_write(**tensors, k_scale=k_scale)
    assert launched[-1][4] == k_scale.data_ptr()
    (one,) = (write.one for write in cache_write.CHECKED.values() if write.one is not None)
    assert (one.item(), one.data_ptr()) == (1, launched[-1][5])


DIFFERENT = {
    "keys of another dtype": ({"key": torch.zeros(5, 2, 64)}, "key dtype: got float32"),
    "a cache of another dtype": ({"kv_cache": torch.zeros(4, 2, 16, 128)}, "key dtype: got bfloat16"),
    "bytes": ({"kv_cache": torch.zeros(4, 2, 16, 128, dtype=torch.uint8)}, "got .*uint8"),
    "keys of other heads": ({"key": torch.zeros(5, 4, 64, dtype=torch.bfloat16)}, "key shape: got"),
    "fewer keys": ({"key": torch.zeros(2, 2, 64, dtype=torch.bfloat16)}, "key rows: got 2"),
    "keys elsewhere": ({"key": torch.zeros(5, 2, 64, dtype=torch.bfloat16, device="meta")}, "key device: got meta"),
    "slots of int32": ({"slot_mapping": torch.zeros(3, dtype=torch.int32)}, "slot_mapping: got int32"),
    "slots elsewhere": ({"slot_mapping": torch.zeros(3, dtype=torch.int64, device="meta")}, "slot_mapping device"),
    "a scale": ({"v_scale": torch.ones(1)}, "v_scale: got"),
    "uneven rows": ({"key": torch.zeros(5, 2, 68, dtype=torch.bfloat16)[..., :64]}, r"key strides: got \(136, 68, 1\)"),
    "a misaligned value": (
        {"value": torch.zeros(5 * 12 * 64 + 4, dtype=torch.bfloat16)[4:].view(5, 12, 64)[:, 10:]},
        "value strides: .*address % 16 = 8",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_wrong_layer_is_refused_after_a_good_one(what: str, launched: list[Launch]) -> None:
    paged_cache_write(**layer())
    changes, message = DIFFERENT[what]
    for _ in range(2):
        with pytest.raises(TLBackendError, match=message):
            paged_cache_write(**{**layer(), **changes})
    assert len(launched) == 1


def test_no_slot_after_some(launched: list[Launch]) -> None:
    paged_cache_write(**layer())
    for _ in range(2):
        paged_cache_write(**{**layer(), "slot_mapping": torch.zeros(0, dtype=torch.int64)})
    assert len(launched) == 1


def test_every_write_asks_for_the_current_device(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(cache_write, "check_current_device", asked.append)
    layers = [layer() for _ in range(3)]
    for tensors in layers:
        paged_cache_write(**tensors)
    assert [tensor.data_ptr() for tensor in asked] == [tensors["kv_cache"].data_ptr() for tensors in layers]


def test_many_numbers_of_tokens_keep_little(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_write, "MAX_CHECKED", 3)
    for count in (1, 2, 3, 4, 5, 1):
        paged_cache_write(**{**layer(), "slot_mapping": torch.zeros(count, dtype=torch.int64)})
        assert len(cache_write.CHECKED) <= 3
    assert [passed[6] for passed in launched] == [1, 2, 3, 4, 5, 1]
