"""Merge of the pieces of a prefill's split tiles: one block a query token and head.

Legend: T query rows, H query heads, D head size, R requests, C split tiles.
"""

from typing import Any

import tilelang.language as T

from tl_backend.kernels.dialect import Dialect, rows, vector
from tl_backend.kernels.pieces import pieces_program
from tl_backend.kernels.tile import ACCUM
from tl_backend.problem import AttentionProblem


def prefill_combine(problem: AttentionProblem, threads: int, dialect: Dialect) -> Any:
    """The prim_func.

    O ``[T, H, D]``, cu_seqlens_q int32 ``[R + 1]``, split int32 ``[C, 4]`` of (request, first token, pieces, slot):
    the pieces of token t lie from row slot + t * pieces on of partial_o float32 ``[..., H, D]`` and partial_lse (base
    2). Where the problem has them: lse float32 ``[H, T]`` (natural log), sinks ``[H]``.
    """
    head_dim, num_heads, dtype = problem.head_dim, problem.num_q_heads, problem.dtype
    sinks_dtype = problem.sinks_dtype or ACCUM
    merge_pieces = pieces_program(problem, dialect)

    @T.prim_func
    def prefill_combine_kernel(
        o_ptr: T.ptr,
        lse_ptr: T.ptr,
        sinks_ptr: T.ptr,
        cu_seqlens_q_ptr: T.ptr,
        split_ptr: T.ptr,
        partial_o_ptr: T.ptr,
        partial_lse_ptr: T.ptr,
        num_split: T.int32,
        tokens_per_tile: T.int32,
        o_stride_t: T.int64,
        o_stride_h: T.int64,
        lse_stride_h: T.int64,
    ):
        O = dialect.tensor(o_ptr, [num_heads, head_dim], dtype, [o_stride_t, o_stride_h])
        lse = rows(lse_ptr, ACCUM, lse_stride_h)
        sinks = vector(sinks_ptr, sinks_dtype)
        cu_seqlens_q = vector(cu_seqlens_q_ptr, "int32")
        split = vector(split_ptr, "int32")
        partial_o = rows(partial_o_ptr, ACCUM, T.int64(head_dim))
        partial_lse = vector(partial_lse_ptr, ACCUM)
        with dialect.launch(num_split * tokens_per_tile * num_heads, threads) as block:
            tile = block // (tokens_per_tile * num_heads)
            token = block // num_heads % tokens_per_tile
            head = block % num_heads
            request = split[4 * tile]
            row = cu_seqlens_q[request] + split[4 * tile + 1] + token
            if row < cu_seqlens_q[request + 1]:
                pieces = split[4 * tile + 2]
                merge_pieces(
                    O, lse, sinks, partial_o, partial_lse, row, head, split[4 * tile + 3] + token * pieces, pieces
                )

    return prefill_combine_kernel
