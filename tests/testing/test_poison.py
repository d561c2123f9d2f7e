"""The harness must catch each fault that it is there for: wrong operations, one a fault, made from the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tl_backend.ops.reference import paged_attention_reference, paged_cache_write_reference
from tl_backend.problem import FLOAT8_DTYPES
from tl_backend.testing.cases import Case, make_batch, make_problem
from tl_backend.testing.poison import LARGE, check_attention
from tl_backend.testing.poison_judge import PoisonError, relative_rms
from tl_backend.testing.poison_writes import check_cache_write
from tl_backend.testing.views import CANARY_ROWS, KV_LAYOUTS, OUT_VIEWS, Q_VIEWS

CPU = torch.device("cpu")
PROBLEM = make_problem(4, 2, 32, 16)
CASE = Case(query_lens=(1, 0, 1, 5, 20), seq_lens=(17, 9, 1, 33, 20))
BITS = {4: torch.int32, 1: torch.uint8}
WINDOW = 6  # Before it, request 0 has the keys 0 ... 10 in its first page, and request 3 the keys 0 ... 22 in two.


def right(q, kv_cache, block_table, cu_seqlens_q, seq_lens, *, out, softmax_scale, causal, window=None, **rest):
    if window is not None:  # The reference multiplies what it masks by zero.
        kv_cache = _without_what_is_before(window, kv_cache, block_table, cu_seqlens_q, seq_lens)
    options = {"softmax_scale": softmax_scale, "causal": causal, "window": window}
    scales = {name: rest[name] for name in ("k_scale", "v_scale") if name in rest}
    out.copy_(paged_attention_reference(q, kv_cache, block_table, cu_seqlens_q, seq_lens, **options, **scales))
    return out


def _without_what_is_before(window, kv_cache, block_table, cu_seqlens_q, seq_lens):
    cleaned = kv_cache.clone()
    for request, (length, seq_len) in enumerate(zip(cu_seqlens_q.diff().tolist(), seq_lens.tolist(), strict=True)):
        hidden = torch.arange(max(0, min(seq_len, seq_len - length - window + 1)))
        blocks = block_table[request].long()[hidden // 16]
        cleaned.view(BITS[cleaned.element_size()])[blocks, :, hidden % 16] = 0
    return cleaned


def wrong(**changes: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """The right operation, with some of its arguments changed."""

    def operation(q, kv_cache, block_table, cu_seqlens_q, seq_lens, **rest):
        names = {"q": q, "kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens, **rest}
        names["cu_seqlens_q"] = cu_seqlens_q
        return right(**{**names, **{name: change(names) for name, change in changes.items()}})

    return operation


def then(effect: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    """The right operation, followed by ``effect``."""

    def operation(q, kv_cache, block_table, cu_seqlens_q, seq_lens, **rest):
        out = right(q, kv_cache, block_table, cu_seqlens_q, seq_lens, **rest)
        effect({"q": q, "kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens, **rest})
        return out

    return operation


def multiply_masked_values_by_zero(x: dict[str, Any]) -> None:
    """What a kernel does that loads whole tiles of V: 0 * NaN."""
    for request, length in enumerate(x["seq_lens"].tolist()):
        if length % 16:
            last = x["kv_cache"][x["block_table"][request, length // 16].long()]
            x["out"][:5] += (0 * last[:, length % 16 :]).sum()


def read_past_the_table(x: dict[str, Any]) -> None:
    """Looks up the entry after the last block, and masks what it finds there."""
    pages = [-(-int(x["seq_lens"][0]) // 16)]
    block = int(x["block_table"][0, pages[0]])
    x["out"][0] += 1e-3 * (block % 7)


def read_unowned_blocks(x: dict[str, Any]) -> None:
    x["out"][:5] += 0 * x["kv_cache"].sum()


def _before_the_window(x: dict[str, Any]) -> torch.Tensor:
    """Keys and values of request 0 that its window has left behind, in the page where the window begins."""
    return x["kv_cache"][x["block_table"][0, 0].long()][:, : 17 - WINDOW]


def filter_what_is_before_the_window(x: dict[str, Any]) -> None:
    """What a kernel does that skips tiles but not keys, and whose maximum drops what is no number."""
    leaked = _before_the_window(x).nan_to_num(0.0, posinf=0.0, neginf=0.0)
    x["out"][0] += 1e-3 * leaked.amax().clamp(min=0.0)


def filter_from_below(x: dict[str, Any]) -> None:
    leaked = _before_the_window(x).nan_to_num(0.0, posinf=0.0, neginf=0.0)
    x["out"][0] += 1e-3 * leaked.amin().clamp(max=0.0)


class Stateful:
    """Answers the first call of every shape rightly, and later ones a little off."""

    def __init__(self, *, only: str) -> None:
        self.only, self.shapes, self.planned = only, [], 0

    def __call__(self, q, kv_cache, block_table, cu_seqlens_q, seq_lens, *, plan=None, **rest):
        out = right(q, kv_cache, block_table, cu_seqlens_q, seq_lens, **rest)
        other_shape_before = bool(self.shapes) and self.shapes[-1] != q.shape
        self.shapes.append(q.shape)
        self.planned += plan is not None
        if (
            (self.only == "other shape" and other_shape_before)
            or (self.only == "plan" and plan is not None)
            or (self.only == "second use" and self.planned == 2)
        ):
            out[0, 0, 0] *= 1 + 1e-6
        # After two uses of a plan, another shape and a third: plans that know each request's keys.
        if self.only == "bounds" and self.planned == 5:
            out *= 1.001
        if self.only == "bounds, again" and self.planned == 6:
            out[0, 0, 0] *= 1 + 1e-6
        return out


def test_the_right_operation_passes() -> None:
    report = check_attention(PROBLEM, CASE, CPU, operation=right)
    assert report.error < 1e-7


@pytest.mark.parametrize("kv_layout", KV_LAYOUTS)
@pytest.mark.parametrize(("q_view", "out_view"), [*zip(Q_VIEWS, (*OUT_VIEWS, "dense"), strict=True)])
@pytest.mark.parametrize("heads", [(4, 2), (1, 1)])
def test_the_right_operation_passes_in_every_layout(kv_layout, q_view, out_view, heads) -> None:
    problem = make_problem(*heads, 32, 16)
    case = Case(query_lens=(1, 5), seq_lens=(17, 33), kv_layout=kv_layout, q_view=q_view, out_view=out_view)
    check_attention(problem, case, CPU, operation=right)


FAULTS = {
    "scale times 1.1": ("error", wrong(softmax_scale=lambda x: 1.1 * 32**-0.5)),
    "not causal": ("error", wrong(causal=lambda x: False)),
    "mask one key too short": ("error", wrong(seq_lens=lambda x: (x["seq_lens"] - 1).clamp(min=0))),
    "query heads permuted": ("error", wrong(q=lambda x: x["q"][:, [1, 0, 3, 2]])),
    "kv heads permuted": ("error", wrong(kv_cache=lambda x: x["kv_cache"].flip(1))),
    "query read as if dense": ("P1", wrong(q=lambda x: x["q"].as_strided(x["q"].shape, (128, 32, 1)))),
    "padding rows left alone": ("P1", then(lambda x: x["out"][27:].fill_(math.nan))),
    "padding rows not zero": ("P1", then(lambda x: x["out"][27:].fill_(1.0))),
    "a row left alone": ("P1", then(lambda x: x["out"][3, 2:].fill_(math.nan))),
    "0 * NaN past the end": ("P2", then(multiply_masked_values_by_zero)),
    "reads blocks of nobody": ("P2", then(read_unowned_blocks)),
    "reads past the block table": ("P3", then(read_past_the_table)),
    "writes before the output": ("P4", then(lambda x: _rows_around(x["out"])[CANARY_ROWS - 1].fill_(0.0))),
    "writes after the output": ("P4", then(lambda x: _rows_around(x["out"])[-CANARY_ROWS].fill_(0.0))),
    "writes before the pool": ("P4", then(lambda x: _blocks_around(x["kv_cache"])[0, 0, -1].fill_(3.0))),
    "writes after the pool": ("P4", then(lambda x: _blocks_around(x["kv_cache"])[-1, 0, 0].fill_(3.0))),
    "writes into the pool": ("P4", then(lambda x: x["kv_cache"][3, 1, 2].fill_(3.0))),
    "leaks state between shapes": ("P6", Stateful(only="other shape")),
    "is another with a plan": ("P6", Stateful(only="plan")),
    "is another at a plan's second use": ("P6", Stateful(only="second use")),
    "is wrong where keys are known": ("error", Stateful(only="bounds")),
    "is another where keys are known": ("bounds 0 too large", Stateful(only="bounds, again")),
    "overruns its scratch": ("P4", then(lambda x: x["plan"] and x["plan"].decode.partial_lse[-1].fill_(0.0))),
}


def _rows_around(out: torch.Tensor) -> torch.Tensor:
    width = out.shape[1] * out.shape[2]
    return out.as_strided((len(out) + 2 * CANARY_ROWS, width), (width, 1), 0)


def _blocks_around(kv_cache: torch.Tensor) -> torch.Tensor:
    return kv_cache.as_strided((len(kv_cache) + 2, *kv_cache.shape[1:]), kv_cache.stride(), 0)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_by_its_rule(fault: str) -> None:
    rule, operation = FAULTS[fault]
    with pytest.raises(PoisonError, match=rule):
        check_attention(PROBLEM, CASE, CPU, operation=operation)


WINDOW_FAULTS = {
    "a window longer by one": ("error", wrong(window=lambda x: WINDOW + 1)),
    "the window only skips tiles": ("error", wrong(window=lambda x: None)),
    "0 * NaN before the window": ("P2", then(lambda x: x["out"][0].add_((0 * _before_the_window(x)).sum()))),
    "large keys before the window": ("P8", then(filter_what_is_before_the_window)),
    "large negative keys before the window": ("P8", then(filter_from_below)),
}


@pytest.mark.parametrize("kv_dtype", ["float32", *FLOAT8_DTYPES])
def test_the_right_operation_with_a_window_passes(kv_dtype: str) -> None:
    problem = make_problem(4, 2, 32, 16, window=WINDOW, kv_dtype=kv_dtype)
    check_attention(problem, CASE, CPU, operation=right)


@pytest.mark.parametrize("kv_dtype", FLOAT8_DTYPES)
def test_poison_of_an_8_bit_cache_is_nan_infinite_or_the_largest_number(kv_dtype: str) -> None:
    batch = make_batch(make_problem(4, 2, 32, 16, kv_dtype=kv_dtype), CASE, CPU)
    dtype = getattr(torch, kv_dtype)
    largest = torch.finfo(dtype).max
    seen = {}
    for value in (math.nan, math.inf, LARGE, -LARGE, 0.0):
        batch.poison(value, -1)
        seen[value] = float(batch.kv_store.view(dtype).flatten()[0])  # Of the canary before the pool.
    assert math.isnan(seen[math.nan])
    assert not abs(seen[math.inf]) < largest
    assert (seen[LARGE], seen[-LARGE], seen[0.0]) == (largest, -largest, 0.0)


@pytest.mark.parametrize("fault", WINDOW_FAULTS)
def test_a_fault_of_a_window_is_caught_by_its_rule(fault: str) -> None:
    rule, operation = WINDOW_FAULTS[fault]
    with pytest.raises(PoisonError, match=rule):
        check_attention(make_problem(4, 2, 32, 16, window=WINDOW), CASE, CPU, operation=operation)


def test_a_wrong_row_among_many_right_ones_is_caught() -> None:
    """Over all rows its error would drown: the row has many keys, so that its values are small."""
    case = Case(query_lens=(1, *[200] * 5), seq_lens=(1500, *[200] * 5))
    operation = then(lambda x: x["out"][0].mul_(1 + 1e-4))
    with pytest.raises(PoisonError, match="worst in request 0"):
        check_attention(PROBLEM, case, CPU, operation=operation)


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        ("error", lambda out: out * (1 + 3e-5)),
        ("P1", lambda out: out.masked_fill(out == out.max(), math.inf)),
    ],
)
def test_a_message_has_value_limit_and_case(rule: str, make: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(PoisonError, match=rule) as caught:
        check_attention(PROBLEM, CASE, CPU, operation=then(lambda x: x["out"].copy_(make(x["out"]))))
    assert "limit" in str(caught.value)
    assert "keys [17, 9, 1, 33, 20]" in str(caught.value)


def test_relative_rms_of_nothing() -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    assert relative_rms(zero, zero) == 0
    assert relative_rms(zero + 1, zero) == math.inf
    assert relative_rms(zero + math.nan, zero) == math.inf


@pytest.mark.parametrize("kv_layout", KV_LAYOUTS)
def test_poison_leaves_what_requests_own(kv_layout) -> None:
    batch = make_batch(PROBLEM, Case(query_lens=(1, 2), seq_lens=(17, 3), kv_layout=kv_layout), CPU)
    batch.poison(math.nan, -1)
    assert int((~batch.kv_store.isnan()).sum()) == batch.kv_SHD.numel()
    batch.poison(math.nan, -1, dead=[0])
    assert int((~batch.kv_store.isnan()).sum()) == 3 * 2 * 64
    assert batch.block_table[1].tolist() == [batch.block_table[1, 0], -1, -1, -1, -1]


def _write(key, value, kv_cache, slots):
    capacity = kv_cache.shape[0] * kv_cache.shape[2]
    paged_cache_write_reference(key, value, kv_cache, torch.where(slots < capacity, slots, -1))


def _write_minus_one(key, value, kv_cache, slots):
    """What slot -1 does where nobody asks: -1 // 16 = -1, -1 % 16 = 15, the last row of the last block."""
    _write(key, value, kv_cache, torch.where(slots == -1, kv_cache.shape[0] * kv_cache.shape[2] - 1, slots))


def _write_past_the_end(key, value, kv_cache, slots):
    _write(key, value, kv_cache, slots)
    _blocks_around(kv_cache)[-1, :, 0] = key[0, 0, 0]


def _write_swapped(key, value, kv_cache, slots):
    _write(value, key, kv_cache, slots)


def _write_dense(key, value, kv_cache, slots):
    _write(key.as_strided(key.shape, (64, 32, 1)), value, kv_cache, slots)


SLOTS = [5, -1, 0, 79, 80, 2**40 + 17, 33]


@pytest.mark.parametrize("kv_layout", KV_LAYOUTS)
def test_the_right_write_passes(kv_layout) -> None:
    check_cache_write(PROBLEM, SLOTS, CPU, kv_layout=kv_layout, operation=_write)


@pytest.mark.parametrize("operation", [_write_minus_one, _write_past_the_end, _write_swapped, _write_dense])
def test_a_wrong_write_is_caught(operation: Callable[..., Any]) -> None:
    with pytest.raises(PoisonError, match="differ from the reference's"):
        check_cache_write(PROBLEM, [5, -1, 80, 2**40 + 17, 33], CPU, operation=operation)
