"""The float64 reference against PyTorch's own attention and against its definition, key by key."""

from __future__ import annotations

import math

import pytest
import torch

from tl_backend.ops.reference import paged_attention_reference, paged_cache_write_reference
from tl_backend.testing.poison_judge import relative_rms


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("query_len", "seq_len"), [(5, 5), (3, 20), (1, 17)])
def test_against_scaled_dot_product_attention(query_len: int, seq_len: int, causal: bool) -> None:
    q = torch.randn(query_len, 6, 32, dtype=torch.float64)
    kv_cache = torch.randn(4, 2, 16, 64, dtype=torch.float64)
    block_table = torch.tensor([[3, 1]], dtype=torch.int32)
    got = paged_attention_reference(
        q,
        kv_cache,
        block_table,
        torch.tensor([0, query_len]),
        torch.tensor([seq_len]),
        softmax_scale=0.3,
        causal=causal,
    )
    kv = torch.cat([kv_cache[3], kv_cache[1]], dim=1)[:, :seq_len].repeat_interleave(3, dim=0)
    mask = torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len) if causal else None
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), kv[..., :32], kv[..., 32:], attn_mask=mask, scale=0.3
    )
    assert relative_rms(got, wanted.transpose(0, 1)) < 1e-14


@pytest.mark.parametrize("causal", [True, False])
def test_each_query_sees_the_keys_up_to_its_position(causal: bool) -> None:
    """With equal logits and one-hot values the output says which keys were seen, and that all weigh the same."""
    kv_cache = torch.zeros(2, 1, 16, 64, dtype=torch.float64)
    kv_cache[1, 0, :16, 32:48] = torch.eye(16)
    kv_cache[0, 0, 0, 48] = 1
    got = paged_attention_reference(
        torch.zeros(4, 1, 32), kv_cache, torch.tensor([[1, 0]]), torch.tensor([0, 4]), torch.tensor([17]), causal=causal
    )
    for row in range(4):
        seen = 17 - 4 + row + 1 if causal else 17
        assert torch.allclose(got[row, 0, :17], torch.tensor([1 / seen] * seen + [0] * (17 - seen)).double())


def test_rows_without_keys_and_padding_rows_are_zero() -> None:
    got = paged_attention_reference(
        torch.randn(7, 1, 32),
        torch.randn(1, 1, 16, 64),
        torch.zeros(3, 1).int(),
        torch.tensor([0, 2, 2, 5]),
        torch.tensor([0, 9, 1]),
    )
    assert [bool(row.any()) for row in got] == [False, False, False, False, True, False, False]


def test_cache_write() -> None:
    kv_cache = torch.full((2, 1, 16, 4), math.nan)
    paged_cache_write_reference(torch.ones(3, 1, 2), 2 * torch.ones(3, 1, 2), kv_cache, torch.tensor([17, -1, 0]))
    assert kv_cache[1, 0, 1].tolist() == [1, 1, 2, 2]
    assert kv_cache[0, 0, 0].tolist() == [1, 1, 2, 2]
    assert int((~kv_cache.isnan()).sum()) == 8
