"""The operations of this package in plain PyTorch and float64: slow, obvious, independent of the kernels.

Legend: T query rows, H query heads, HK kv heads, D head size, R requests, S keys of a request.
"""

from __future__ import annotations

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
) -> torch.Tensor:
    """Attention over a paged cache: gather each request's pages, then a dense softmax.

    Args and result as ``tl_backend.ops.paged_attention``, but the result is float64 ``[T, H, D]`` on the inputs'
    device. Rows past ``cu_seqlens_q[-1]`` and rows that see no key are zero.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, page_size = kv_cache.shape[1], kv_cache.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(num_rows, num_heads, head_dim, dtype=torch.float64, device=q.device)
    starts = cu_seqlens_q.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[request], starts[request + 1]
        if end == start or seq_len == 0:
            continue
        pages = block_table[request, : -(-seq_len // page_size)].long()
        kv_SHD = kv_cache[pages].permute(0, 2, 1, 3).reshape(-1, num_kv_heads, 2 * head_dim)[:seq_len].double()
        k_SHD, v_SHD = kv_SHD.repeat_interleave(num_heads // num_kv_heads, dim=1).split(head_dim, dim=-1)
        logits_HTS = torch.einsum("thd,shd->hts", q[start:end].double(), k_SHD) * scale
        if causal:
            position_T1 = seq_len - (end - start) + torch.arange(end - start, device=q.device)[:, None]
            hidden_TS = torch.arange(seq_len, device=q.device)[None, :] > position_T1
            logits_HTS = logits_HTS.masked_fill(hidden_TS, -torch.inf)
        # A row that sees no key is all -inf, and its softmax NaN: its output is zero.
        weights_HTS = logits_HTS.softmax(-1).nan_to_num(nan=0.0)
        out[start:end] = torch.einsum("hts,shd->thd", weights_HTS, v_SHD)
    return out


def paged_cache_write_reference(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write ``key`` and ``value`` ``[n, HK, D]`` to their slots, row by row; negative slots are skipped."""
    page_size, head_dim = kv_cache.shape[2], key.shape[-1]
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            kv_cache[slot // page_size, :, slot % page_size, :head_dim] = key[row].to(kv_cache.dtype)
            kv_cache[slot // page_size, :, slot % page_size, head_dim:] = value[row].to(kv_cache.dtype)
