"""Varlen prefill over a paged cache, or over contiguous keys and values.

Every block takes one item of a work list, a tile of query tokens of one request.

Legend: T query rows, H query heads, HK kv heads, D head size, R requests, W work items.
"""

from typing import Any

import tilelang.language as T

from tl_backend.configs.tile import TileConfig
from tl_backend.kernels.dialect import Dialect, rows, vector
from tl_backend.kernels.order import WorkOrder
from tl_backend.kernels.tile import ACCUM, LN2, tile_program
from tl_backend.problem import AttentionProblem


def prefill(problem: AttentionProblem, config: TileConfig, dialect: Dialect) -> Any:
    """The prim_func.

    Q ``[T, H, D]``, K the cache ``[num_blocks, HK, page, 2 * D]`` (V is not read), O ``[T, H, D]``, block_table int32
    ``[R, max_blocks]``, cu_seqlens_q int32 ``[R + 1]``, seq_lens int32 ``[R]``, work int32 ``[W, 4]`` of (request,
    first token) and two columns that only Hopper's prefill reads, longest first. Where the problem is not paged: K and
    V ``[S, HK, D]``, and cu_seqlens_k int32 ``[R + 1]`` as the only column of block_table, which seq_lens is not read
    beside. Where the problem has them: lse float32 ``[H, T]`` (natural log), sinks and ALiBi slopes float32 ``[H]``.
    """
    program = tile_program(problem, config, dialect)
    block_m, heads, tokens = config.block_m, config.heads_per_tile, config.tokens_per_tile
    block_n, dtype, head_dim = config.block_n, problem.dtype, problem.head_dim
    group, num_heads, num_kv_heads = problem.group_size, problem.num_q_heads, problem.num_kv_heads
    head_tiles = config.head_tiles(problem)
    order = WorkOrder(lanes=num_kv_heads * head_tiles, config=config)
    quantized = problem.is_quantized
    has_sinks, sinks_dtype = problem.sinks_dtype is not None, problem.sinks_dtype or ACCUM

    @T.prim_func
    def prefill_kernel(
        q_ptr: T.ptr,
        k_ptr: T.ptr,
        v_ptr: T.ptr,
        o_ptr: T.ptr,
        lse_ptr: T.ptr,
        sinks_ptr: T.ptr,
        slopes_ptr: T.ptr,
        k_scale_ptr: T.ptr,
        v_scale_ptr: T.ptr,
        block_table_ptr: T.ptr,
        cu_seqlens_q_ptr: T.ptr,
        seq_lens_ptr: T.ptr,
        work_ptr: T.ptr,
        num_work: T.int32,
        num_rows: T.int32,
        max_blocks: T.int32,
        softmax_scale: T.float32,
        q_stride_t: T.int64,
        q_stride_h: T.int64,
        k_stride_b: T.int64,
        k_stride_h: T.int64,
        k_stride_s: T.int64,
        v_stride_s: T.int64,
        v_stride_h: T.int64,
        o_stride_t: T.int64,
        o_stride_h: T.int64,
        block_table_stride: T.int64,
        lse_stride_h: T.int64,
    ):
        Q = dialect.tensor(q_ptr, [num_heads, head_dim], dtype, [q_stride_t, q_stride_h])
        K = program.keys(k_ptr, k_stride_b, k_stride_h, k_stride_s)
        V = program.values(K, v_ptr, v_stride_s, v_stride_h)
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
        work = vector(work_ptr, "int32")
        with dialect.launch(order.num_blocks(num_work), config.threads) as block:
            q_MD = dialect.shared([block_m, head_dim], dtype)
            o_MD = dialect.fragment([block_m, head_dim], ACCUM)
            max_M = dialect.fragment([block_m], ACCUM)
            sum_M = dialect.fragment([block_m], ACCUM)
            with order.turns(block, num_work) as turn:
                item = order.item(block, turn, num_work)
                lane = order.lane(block, num_work)
                kv_head = lane // head_tiles
                first_head = kv_head * group + lane % head_tiles * heads
                last_head = (kv_head + 1) * group - 1
                request = work[4 * item]
                token0 = work[4 * item + 1]
                row0 = cu_seqlens_q[request] + token0
                query_len = cu_seqlens_q[request + 1] - cu_seqlens_q[request]
                seq_len = program.sequence_length(seq_lens, block_table, request, max_blocks)
                position0 = seq_len - query_len + token0
                # Variables: TileLang 0.1.12 rewrites a guard on the expressions, and gets 71 heads in two tiles wrong.
                heads_here = T.alloc_var("int32")
                heads_here = T.min(last_head - first_head + 1, heads)
                tokens_here = T.alloc_var("int32")
                tokens_here = T.min(query_len - token0, tokens)
                # Keys are stored divided by their scale: it joins the logits' one.
                scale = T.alloc_var(ACCUM)
                scale = softmax_scale * k_scale[0] if quantized else softmax_scale
                slope_M = dialect.fragment([block_m], ACCUM)
                if problem.has_alibi:
                    program.load_heads(slopes, slope_M, first_head, last_head)
                program.load_q(Q, q_MD, row0, first_head, T.min(row0 - token0 + query_len, num_rows) - 1, last_head)
                program.attend(
                    q_MD, K, V, block_table, o_MD, max_M, sum_M, request, kv_head, position0, seq_len,
                    program.first_tile(position0), T.ceildiv(program.end_key(position0, seq_len), block_n),
                    slope_M, scale,
                )  # fmt: skip
                if has_sinks:
                    program.add_sinks(sinks, o_MD, max_M, sum_M, first_head, last_head, scale)
                if problem.returns_lse:
                    for i in dialect.parallel(block_m):
                        if i // heads < tokens_here and i % heads < heads_here:
                            lse[first_head + i % heads, row0 + i // heads] = LN2 * program.log_sum_exp(
                                max_M[i], sum_M[i], scale
                            )
                program.normalise(o_MD, sum_M, v_scale[0] if quantized else 1.0)
                # Through shared memory, so that the store is of whole vectors.
                T.copy(o_MD, q_MD)
                for i, d in dialect.parallel(block_m, head_dim):
                    if i // heads < tokens_here and i % heads < heads_here:
                        O[row0 + i // heads, first_head + i % heads, d] = q_MD[i, d]

    return prefill_kernel
