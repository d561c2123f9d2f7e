"""The allocations of a test's tensors, and the strided views of them that operations get.

Legend: T query rows, H query heads, HK kv heads, D head size.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from tl_backend.problem import AttentionProblem

KVLayout = Literal["HND", "NHD", "layers", "padded"]
View = Literal["dense", "fused", "padded", "heads_first"]

KV_LAYOUTS: tuple[KVLayout, ...] = ("HND", "NHD", "layers", "padded")
Q_VIEWS: tuple[View, ...] = ("dense", "fused", "padded", "heads_first")
OUT_VIEWS: tuple[View, ...] = ("dense", "padded", "heads_first")

CANARY_ROWS = 2  # Before and after the rows of ``out``.
PAD_BYTES = 16  # Between what would be dense: the alignment that GPU kernels need, and no more.


def kv_pool(
    problem: AttentionProblem, num_blocks: int, layout: KVLayout, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The allocation, and the ``[num_blocks, HK, block_size, 2 * D]`` view between its first and its last block."""
    blocks, heads, page, width = num_blocks + 2, problem.num_kv_heads, page_size_of(problem), 2 * problem.head_dim
    if layout == "HND":
        store = torch.empty(blocks, heads, page, width, dtype=dtype, device=device)
        view = store
    elif layout == "NHD":
        store = torch.empty(blocks, page, heads, width, dtype=dtype, device=device)
        view = store.transpose(1, 2)
    elif layout == "layers":
        store = torch.empty(blocks, 3, heads, page, width, dtype=dtype, device=device)
        view = store[:, 1]
    else:
        store = torch.empty(blocks, page, heads + 1, width + pad(dtype), dtype=dtype, device=device)
        view = store[:, :, :heads, :width].transpose(1, 2)
    return store, odd_strides(view[1:-1])


def pad(dtype: torch.dtype) -> int:
    """Elements of ``PAD_BYTES``."""
    return PAD_BYTES // dtype.itemsize


def page_size_of(problem: AttentionProblem) -> int:
    """Of a problem that has pages."""
    assert problem.page_size is not None, "a pool needs a problem of pages"
    return problem.page_size


def odd_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, but every dimension of extent 1, the last aside, has a stride that means nothing."""
    strides = list(tensor.stride())
    for dim, extent in enumerate(tensor.shape[:-1]):
        if extent == 1:
            strides[dim] = 2 * dim + 7
    return tensor.as_strided(tensor.shape, strides)


def out_view(store: torch.Tensor, problem: AttentionProblem, view: View) -> torch.Tensor:
    """The ``[T, H, D]`` output within its allocation."""
    width = problem.num_q_heads * problem.head_dim
    if view == "heads_first":
        return odd_strides(store.transpose(0, 1)[CANARY_ROWS:-CANARY_ROWS])
    rows = store[CANARY_ROWS:-CANARY_ROWS, :width]
    return odd_strides(rows.unflatten(-1, (problem.num_q_heads, problem.head_dim)))


def out_store(
    num_rows: int, problem: AttentionProblem, view: View, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The allocation that ``out_view`` takes its view of."""
    rows, heads, head_dim = num_rows + 2 * CANARY_ROWS, problem.num_q_heads, problem.head_dim
    if view == "heads_first":
        return torch.empty(heads, rows, head_dim, dtype=dtype, device=device)
    return torch.empty(rows, heads * head_dim + (pad(dtype) if view == "padded" else 0), dtype=dtype, device=device)


def q_view(
    num_rows: int, problem: AttentionProblem, view: View, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Queries ``[T, H, D]``, NaN, as is all that lies between them."""
    heads, head_dim = problem.num_q_heads, problem.head_dim

    def nan(*shape: int) -> torch.Tensor:
        return torch.full(shape, math.nan, dtype=dtype, device=device)

    if view == "fused":
        rows = nan(num_rows, heads + 2 * problem.num_kv_heads, head_dim)
        return rows[:, :heads]
    if view == "padded":
        return nan(num_rows, heads, head_dim + pad(dtype))[..., :head_dim]
    if view == "heads_first":
        return nan(heads, num_rows, head_dim).transpose(0, 1)
    return nan(num_rows, heads, head_dim)
