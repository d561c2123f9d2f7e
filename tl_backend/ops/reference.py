"""The operations of this package in plain PyTorch and float64: slow, obvious, independent of the kernels.

Legend: T query rows, H query heads, HK kv heads, D head size, R requests, S keys of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def paged_attention_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over a paged cache: gather each request's pages, then a dense softmax.

    Args and result as ``tl_backend.ops.paged_attention``, but the result is float64 ``[T, H, D]`` on the inputs'
    device. Rows past ``cu_seqlens_q[-1]`` and rows that see no key are zero.
    """
    num_kv_heads, page_size, head_dim = kv_cache.shape[1], kv_cache.shape[2], q.shape[2]

    def keys_and_values(request: int, seq_len: int) -> tuple[torch.Tensor, ...]:
        pages = block_table[request, : -(-seq_len // page_size)].long()
        kv_SHD = _rows(kv_cache, pages).permute(0, 2, 1, 3).reshape(-1, num_kv_heads, 2 * head_dim)[:seq_len]
        return kv_SHD[..., :head_dim], kv_SHD[..., head_dim:]

    return _attention(
        q, keys_and_values, cu_seqlens_q.tolist(), seq_lens.tolist(), num_kv_heads,
        softmax_scale=softmax_scale, causal=causal, window=window, soft_cap=soft_cap, sinks=sinks,
        alibi_slopes=alibi_slopes, k_scale=k_scale, v_scale=v_scale, lse=lse,
    )  # fmt: skip


def varlen_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    **features: Any,
) -> torch.Tensor:
    """Args and result as ``tl_backend.ops.varlen_attention``, but the result is float64; features as above."""
    first = cu_seqlens_k.tolist()

    def keys_and_values(request: int, seq_len: int) -> tuple[torch.Tensor, ...]:
        rows = slice(first[request], first[request] + seq_len)
        return k[rows], v[rows]

    return _attention(q, keys_and_values, cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist(), k.shape[1], **features)


def _attention(
    q: torch.Tensor,
    keys_and_values: Callable[[int, int], tuple[torch.Tensor, ...]],
    starts: list[int],
    seq_lens: list[int],
    num_kv_heads: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """``keys_and_values(request, seq_len)`` gives two tensors ``[S, HK, D]``."""
    if lse is not None:
        lse.fill_(-torch.inf)
    num_rows, num_heads, head_dim = q.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(num_rows, num_heads, head_dim, dtype=torch.float64, device=q.device)
    for request, seq_len in enumerate(seq_lens):
        start, end = starts[request], starts[request + 1]
        if end == start:
            continue
        k_SHD, v_SHD = (
            stored.double().repeat_interleave(num_heads // num_kv_heads, dim=1)
            for stored in keys_and_values(request, seq_len)
        )
        if k_scale is not None:
            k_SHD = k_SHD * k_scale.double()
        if v_scale is not None:
            v_SHD = v_SHD * v_scale.double()
        logits_HTS = torch.einsum("thd,shd->hts", q[start:end].double(), k_SHD) * scale
        if soft_cap is not None:
            logits_HTS = soft_cap * (logits_HTS / soft_cap).tanh()
        position_T1 = seq_len - (end - start) + torch.arange(end - start, device=q.device)[:, None]
        distance_TS = torch.arange(seq_len, device=q.device)[None, :] - position_T1
        if alibi_slopes is not None:
            bias_TS = distance_TS if causal else -distance_TS.abs()
            logits_HTS = logits_HTS + alibi_slopes.double()[:, None, None] * bias_TS
        hidden_TS = distance_TS > 0 if causal else torch.zeros_like(distance_TS, dtype=torch.bool)
        if window is not None:
            hidden_TS = hidden_TS | (distance_TS.abs() >= window)
        logits_HTS = logits_HTS.masked_fill(hidden_TS, -torch.inf)
        if sinks is not None:  # One more key, of no value.
            sink_HT1 = sinks.double()[:, None, None].expand(num_heads, end - start, 1)
            logits_HTS = torch.cat([logits_HTS, sink_HT1], dim=-1)
        if lse is not None:
            lse[:, start:end] = logits_HTS.logsumexp(-1)
        # A row that sees no key is all -inf, and its softmax NaN: its output is zero.
        sees_none_HT1 = (logits_HTS == -torch.inf).all(-1, keepdim=True)
        weights_HTS = logits_HTS.softmax(-1).masked_fill(sees_none_HT1, 0.0)[..., :seq_len]
        out[start:end] = torch.einsum("hts,shd->thd", weights_HTS, v_SHD)
    return out


def _rows(kv_cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """The pages; torch does not index 8-bit floats."""
    if kv_cache.element_size() > 1:
        return kv_cache[pages]
    return kv_cache.view(torch.uint8)[pages].view(kv_cache.dtype).float()


def paged_cache_write_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write ``key`` and ``value`` ``[n, HK, D]`` to their slots, row by row; negative slots are skipped.

    In an 8-bit cache what is stored is divided by its scale, cut to the format's range, and rounded to nearest even.
    """
    page_size, head_dim = kv_cache.shape[2], key.shape[-1]

    def stored(row: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if kv_cache.element_size() > 1:
            return row.to(kv_cache.dtype)
        scaled = row.float() if scale is None else row.float() / scale
        largest = torch.finfo(kv_cache.dtype).max
        return scaled.clamp(-largest, largest).to(kv_cache.dtype)

    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            kv_cache[slot // page_size, :, slot % page_size, :head_dim] = stored(key[row], k_scale)
            kv_cache[slot // page_size, :, slot % page_size, head_dim:] = stored(value[row], v_scale)
