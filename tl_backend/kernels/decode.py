"""Paged split-KV decode: a block takes the query heads of one kv head of one request, over one piece of its keys.

With one piece a request the block writes the output; with more it writes a partial output and its log-sum-exp, which
``decode_combine`` merges. Lengths are read on the device and the grid depends on none of them.

Legend: T query rows, H query heads, HK kv heads, D head size, R requests, S pieces a request.
"""

from typing import Any

import tilelang.language as T

from tl_backend.configs.decode import DecodeConfig
from tl_backend.kernels.dialect import Dialect, rows, vector
from tl_backend.kernels.pieces import pieces_program
from tl_backend.kernels.tile import ACCUM, LN2, tile_program
from tl_backend.problem import AttentionProblem


def decode(problem: AttentionProblem, config: DecodeConfig, dialect: Dialect) -> Any:
    """The prim_func. Queries of at most one token; a request without a token is skipped.

    Q, KV, O, block_table, cu_seqlens_q, seq_lens as in ``prefill``; partial_o float32 ``[R * S, H, D]`` and partial_lse
    float32 ``[R * S, H]`` (base 2, -inf for a piece without keys), which ``config.split`` makes it write instead of O.
    """
    tile = config.tile
    program = tile_program(problem, tile, dialect)
    block_m, block_n, heads = tile.block_m, tile.block_n, tile.heads_per_tile
    dtype, head_dim, group = problem.dtype, problem.head_dim, problem.group_size
    num_heads, num_kv_heads, head_tiles = problem.num_q_heads, problem.num_kv_heads, tile.head_tiles(problem)
    lanes = num_kv_heads * head_tiles
    quantized = problem.is_quantized
    has_sinks, sinks_dtype = problem.sinks_dtype is not None, problem.sinks_dtype or ACCUM
    adds_sinks = has_sinks and not config.split  # With pieces, the combine adds them.

    @T.prim_func
    def decode_kernel(
        q_ptr: T.ptr,
        kv_ptr: T.ptr,
        o_ptr: T.ptr,
        lse_ptr: T.ptr,
        sinks_ptr: T.ptr,
        slopes_ptr: T.ptr,
        k_scale_ptr: T.ptr,
        v_scale_ptr: T.ptr,
        block_table_ptr: T.ptr,
        cu_seqlens_q_ptr: T.ptr,
        seq_lens_ptr: T.ptr,
        partial_o_ptr: T.ptr,
        partial_lse_ptr: T.ptr,
        num_requests: T.int32,
        num_splits: T.int32,
        num_rows: T.int32,
        max_blocks: T.int32,
        softmax_scale: T.float32,
        q_stride_t: T.int64,
        q_stride_h: T.int64,
        kv_stride_b: T.int64,
        kv_stride_h: T.int64,
        kv_stride_s: T.int64,
        o_stride_t: T.int64,
        o_stride_h: T.int64,
        block_table_stride: T.int64,
        lse_stride_h: T.int64,
    ):
        Q = dialect.tensor(q_ptr, [num_heads, head_dim], dtype, [q_stride_t, q_stride_h])
        KV = program.keys(kv_ptr, kv_stride_b, kv_stride_h, kv_stride_s)
        O = dialect.tensor(o_ptr, [num_heads, head_dim], dtype, [o_stride_t, o_stride_h])
        # TileLang's wrapper wants a tensor for every pointer, used or not.
        lse = rows(lse_ptr, ACCUM, lse_stride_h)
        sinks = vector(sinks_ptr, sinks_dtype)
        slopes = vector(slopes_ptr, ACCUM)
        k_scale = vector(k_scale_ptr, ACCUM)
        v_scale = vector(v_scale_ptr, ACCUM)
        block_table = rows(block_table_ptr, "int32", block_table_stride)
        cu_seqlens_q = vector(cu_seqlens_q_ptr, "int32")
        seq_lens = vector(seq_lens_ptr, "int32")
        partial_o = rows(partial_o_ptr, ACCUM, T.int64(head_dim))
        partial_lse = vector(partial_lse_ptr, ACCUM)
        with dialect.launch(num_requests * lanes * num_splits, config.tile.threads) as block:
            q_MD = dialect.shared([block_m, head_dim], dtype)
            o_MD = dialect.fragment([block_m, head_dim], ACCUM)
            max_M = dialect.fragment([block_m], ACCUM)
            sum_M = dialect.fragment([block_m], ACCUM)
            split = block % num_splits
            lane = block // num_splits % lanes
            request = block // (num_splits * lanes)
            kv_head = lane // head_tiles
            first_head = kv_head * group + lane % head_tiles * heads
            last_head = (kv_head + 1) * group - 1
            # Variables: TileLang 0.1.12 rewrites a guard on the expressions, and gets 71 heads in two tiles wrong.
            heads_here = T.alloc_var("int32")
            heads_here = T.min(last_head - first_head + 1, heads)
            row = cu_seqlens_q[request]
            has_query = cu_seqlens_q[request + 1] > row
            seq_len = T.if_then_else(has_query, program.sequence_length(seq_lens, block_table, request, max_blocks), 0)
            first_tile = T.alloc_var("int32")
            first_tile = program.first_tile(seq_len - 1)
            num_tiles = T.ceildiv(seq_len, block_n)
            tiles_per_split = T.ceildiv(num_tiles - first_tile, num_splits)
            # Variables, not expressions: TileLang inlines those into every index, and proving the divisions took it ten
            # times as long as all the rest.
            tile_begin = T.alloc_var("int32")
            tile_end = T.alloc_var("int32")
            tile_begin = T.min(first_tile + split * tiles_per_split, num_tiles)
            tile_end = T.min(tile_begin + tiles_per_split, num_tiles)
            # Keys are stored divided by their scale: it joins the logits' one.
            scale = T.alloc_var(ACCUM)
            scale = softmax_scale * k_scale[0] if quantized else softmax_scale
            slope_M = dialect.fragment([block_m], ACCUM)
            if problem.has_alibi:
                program.load_heads(slopes, slope_M, first_head, last_head)
            program.load_q(Q, q_MD, row, first_head, T.min(row, num_rows - 1), last_head)
            program.attend(
                q_MD, KV, KV, block_table, o_MD, max_M, sum_M, request, kv_head, seq_len - 1, seq_len,
                tile_begin, tile_end, slope_M, scale,
            )  # fmt: skip
            if adds_sinks:
                program.add_sinks(sinks, o_MD, max_M, sum_M, first_head, last_head, scale)
            program.normalise(o_MD, sum_M, v_scale[0] if quantized else 1.0)
            for i, d in dialect.parallel(block_m, head_dim):
                if has_query and i < heads_here:
                    if config.split:
                        partial_o[(request * num_splits + split) * num_heads + first_head + i, d] = o_MD[i, d]
                    else:
                        O[row, first_head + i, d] = T.cast(o_MD[i, d], dtype)
            for i in dialect.parallel(block_m):
                if has_query and i < heads_here:
                    if config.split:
                        partial_lse[(request * num_splits + split) * num_heads + first_head + i] = program.log_sum_exp(
                            max_M[i], sum_M[i], scale
                        )
                    elif problem.returns_lse:
                        lse[first_head + i, row] = LN2 * program.log_sum_exp(max_M[i], sum_M[i], scale)

    return decode_kernel


def decode_combine(problem: AttentionProblem, threads: int, dialect: Dialect) -> Any:
    """The prim_func that merges the pieces of every request: one block a request and query head."""
    head_dim, num_heads, dtype = problem.head_dim, problem.num_q_heads, problem.dtype
    sinks_dtype = problem.sinks_dtype or ACCUM
    merge_pieces = pieces_program(problem, dialect)

    @T.prim_func
    def decode_combine_kernel(
        o_ptr: T.ptr,
        lse_ptr: T.ptr,
        sinks_ptr: T.ptr,
        cu_seqlens_q_ptr: T.ptr,
        partial_o_ptr: T.ptr,
        partial_lse_ptr: T.ptr,
        num_requests: T.int32,
        num_splits: T.int32,
        o_stride_t: T.int64,
        o_stride_h: T.int64,
        lse_stride_h: T.int64,
    ):
        O = dialect.tensor(o_ptr, [num_heads, head_dim], dtype, [o_stride_t, o_stride_h])
        lse = rows(lse_ptr, ACCUM, lse_stride_h)
        sinks = vector(sinks_ptr, sinks_dtype)
        cu_seqlens_q = vector(cu_seqlens_q_ptr, "int32")
        partial_o = rows(partial_o_ptr, ACCUM, T.int64(head_dim))
        partial_lse = vector(partial_lse_ptr, ACCUM)
        with dialect.launch(num_requests * num_heads, threads) as block:
            request = block // num_heads
            row = cu_seqlens_q[request]
            if cu_seqlens_q[request + 1] > row:
                merge_pieces(
                    O, lse, sinks, partial_o, partial_lse, row, block % num_heads, request * num_splits, num_splits
                )

    return decode_combine_kernel
