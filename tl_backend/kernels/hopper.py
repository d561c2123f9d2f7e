"""Constructs of Hopper that its kernels share: TMA boxes of swizzled tiles, and barriers between warps.

A tile's rows are cut into columns of ``swizzled_columns`` elements, each a TMA box: the swizzle that WGMMA reads
without bank conflicts repeats in rows of 128 (or 64) bytes.
"""

from typing import Any

import tilelang.language as T
from tvm import tirx

from tl_backend.configs.prefill_hopper import WARP, swizzled_columns
from tl_backend.configs.tile import ELEMENT_BYTES
from tl_backend.kernels.dialect import GPU_STRIDE_UNIT

# CUtensorMapDataType, and CUtensorMapSwizzle by columns of 16 bits.
_DATA_TYPES = {"uint8": 0, "float16": 6, "bfloat16": 9}
_SWIZZLES = {64: 3, 32: 2}
_NO_SWIZZLE = 0
_L2_PROMOTION_256B = 2
# Named barriers of a block: 1, 2, 3 pass the turn to a consumer, 4, 5, 6 are a consumer's own.
TURN, OWN = 1, 4


def heads_box(tensor: Any, dtype: str, head_dim: int, num_heads: int, rows: Any, strides: Any, heads: int, tokens: int):
    """The descriptor of boxes ``[tokens, heads, columns]`` of ``[rows, num_heads, head_dim]``.

    Args:
        strides: of a row and of a head, in units of 8 elements.
    """
    stride_t, stride_h = strides
    return _descriptor(
        tensor,
        dtype,
        shape=(head_dim, num_heads, rows),
        strides=(stride_h, stride_t),
        box=(swizzled_columns(head_dim), heads, tokens),
    )


def pages_box(tensor: Any, dtype: str, head_dim: int, shape: Any, strides: Any, keys: int):
    """The descriptor of boxes ``[keys, columns]`` of the cache ``[num_blocks, HK, page, 2 * head_dim]``.

    Elements of 8 bits come as whole rows and without a swizzle: nothing but loads of vectors reads them.

    Args:
        shape: of blocks, heads and slots; a block outside is read as zeros.
        strides: of blocks, heads and slots, in units of 8 elements.
    """
    num_blocks, num_kv_heads, page_size = shape
    stride_b, stride_h, stride_s = strides
    return _descriptor(
        tensor,
        dtype,
        shape=(2 * head_dim, page_size, num_kv_heads, num_blocks),
        strides=(stride_s, stride_h, stride_b),
        box=(head_dim if dtype == "uint8" else swizzled_columns(head_dim), keys, 1, 1),
    )


def _descriptor(tensor: Any, dtype: str, *, shape: tuple, strides: tuple, box: tuple):
    """Of the driver's cuTensorMapEncodeTiled, innermost dimension first."""
    rank = len(shape)
    element, swizzle = (1, _NO_SWIZZLE) if dtype == "uint8" else (ELEMENT_BYTES[dtype], _SWIZZLES[box[0]])
    return T.create_tma_descriptor(
        _DATA_TYPES[dtype], rank, tensor.data,
        *shape, element, *[stride * (GPU_STRIDE_UNIT * element) for stride in strides], *box, *[1] * rank,
        0, swizzle, _L2_PROMOTION_256B, 0,
    )  # fmt: skip


def tma_store(*arguments: Any):
    """The intrinsic: a descriptor, an address in shared memory, coordinates. TileLang has no wrapper for it."""
    return tirx.call_intrin("handle", tirx.op.Op.get("tl.tma_store"), *arguments, 0, 0)


@T.macro
def arrive_warp(barriers, index):
    """One arrival for the whole warp, not one a thread."""
    T.sync_warp()
    if T.get_thread_binding() % WARP == 0:
        T.mbarrier_arrive(barriers[index])
