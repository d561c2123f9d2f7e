"""The merge of two partial attentions, against attention over all keys and against its own formula in float64."""

import math

import pytest
import torch

from tl_backend.errors import InvalidInputError
from tl_backend.ops import merge_attention, varlen_attention
from tl_backend.ops.reference import varlen_attention_reference
from tl_backend.testing.poison_judge import relative_rms

H, HK, D = 6, 2, 80
TOLERANCE = 1e-5


def attend(q, kv, lens_k):
    starts = torch.tensor([0, *lens_k]).cumsum(0).int()
    cu_q = torch.arange(len(lens_k) + 1).int() * (len(q) // len(lens_k))
    lse = torch.empty(H, len(q))
    out = varlen_attention(
        q, kv[:, :HK], kv[:, HK:], cu_q, starts,
        max_seqlen_q=len(q), max_seqlen_k=max(lens_k), causal=False, lse=lse,
    )  # fmt: skip
    return out, lse


def test_two_halves_of_the_keys_make_the_whole() -> None:
    """One request has no keys in one half, one has none at all."""
    generator = torch.Generator().manual_seed(0)
    first, second = [40, 0, 7, 0], [13, 33, 1, 0]
    q = torch.randn(4 * 5, H, D, generator=generator)
    kv_a, kv_b = (torch.randn(sum(lens), 2 * HK, D, generator=generator) for lens in (first, second))
    both = [part for a, b in zip(kv_a.split(first), kv_b.split(second), strict=True) for part in (a, b)]
    lens = [a + b for a, b in zip(first, second, strict=True)]
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    kv, cu_q = torch.cat(both), torch.arange(5).int() * 5
    wanted_lse = torch.empty(H, len(q), dtype=torch.float64)
    wanted = varlen_attention_reference(q, kv[:, :HK], kv[:, HK:], cu_q, starts, causal=False, lse=wanted_lse)
    lse = torch.full((H, len(q)), math.nan)
    out = merge_attention(*attend(q, kv_a, first), *attend(q, kv_b, second), lse=lse)
    assert relative_rms(out, wanted) <= TOLERANCE
    assert (out[15:] == 0).all()
    assert (lse[:, 15:] == -math.inf).all()
    assert (lse[:, :15].double() - wanted_lse[:, :15]).abs().max() <= 1e-5


def test_a_side_without_keys_is_not_read() -> None:
    a, b = torch.full((3, H, D), math.nan), torch.randn(3, H, D, generator=torch.Generator().manual_seed(1))
    none, some = torch.full((H, 3), -math.inf), torch.zeros(H, 3)
    assert torch.equal(merge_attention(a, none, b, some), b)
    assert torch.equal(merge_attention(b, some, a, none), b)


def test_log_sum_exps_far_apart_and_large() -> None:
    a, b = torch.ones(4, H, D), torch.full((4, H, D), 3.0)
    lse_a = torch.tensor([[1e4, -1e4, 0.0, 80.0]] * H)
    lse_b = torch.tensor([[1e4, 1e4, -200.0, 80.0 + math.log(3.0)]] * H)
    lse = torch.empty(H, 4)
    out = merge_attention(a, lse_a, b, lse_b, lse=lse)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([2.0, 3.0, 1.0, 2.5]), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(
        lse[0], torch.tensor([1e4 + math.log(2.0), 1e4, 0.0, 80.0 + math.log(4.0)]), rtol=1e-6, atol=1e-6
    )


def test_in_place_and_into_a_strided_view() -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(7, H, D, generator=generator), torch.randn(7, H, D, generator=generator)
    lse_a, lse_b = torch.randn(H, 7, generator=generator), torch.randn(H, 7, generator=generator)
    wanted = merge_attention(a, lse_a, b, lse_b)
    store = torch.full((7, H, D + 16), math.nan)
    merge_attention(a, lse_a, b, lse_b, out=store[..., :D])
    assert torch.equal(store[..., :D], wanted)
    assert store[..., D:].isnan().all()
    merge_attention(a, lse_a, b, lse_b, out=b)
    assert torch.equal(b, wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out_b": torch.zeros(7, H, D - 16)}, r"out_b shape: got \[7, 6, 64\]"),
        ({"lse_b": torch.zeros(7, H)}, r"lse_b shape: got \[7, 6\]"),
        ({"lse_a": torch.zeros(H, 7).double()}, "lse_a: got float64"),
        ({"out": torch.zeros(1, H, D).expand(7, H, D)}, r"out strides: got \(0, 80, 1\)"),
        ({"lse": torch.zeros(1, 7).expand(H, 7)}, r"lse strides: got \(0, 1\)"),
        ({"out_b": torch.zeros(7, H, D).half()}, "out_b dtype: got float16"),
    ],
)
def test_malformed(change: dict[str, torch.Tensor], message: str) -> None:
    given = {
        "out_a": torch.zeros(7, H, D), "lse_a": torch.zeros(H, 7),
        "out_b": torch.zeros(7, H, D), "lse_b": torch.zeros(H, 7),
    }  # fmt: skip
    with pytest.raises(InvalidInputError, match=message):
        merge_attention(**(given | change))


def test_no_rows() -> None:
    """Tensors without elements all have the address 0."""
    out, lse = torch.zeros(0, H, D), torch.zeros(H, 0)
    assert merge_attention(out, lse, out, lse, lse=torch.zeros(H, 0)).shape == out.shape


def test_the_result_may_not_overwrite_what_others_read() -> None:
    out, lse = torch.zeros(7, H, D), torch.zeros(H, 7)
    with pytest.raises(InvalidInputError, match="lse: got lse_a or lse_b"):
        merge_attention(out, lse, out, lse.clone(), lse=lse)
