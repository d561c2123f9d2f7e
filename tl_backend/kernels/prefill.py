"""Paged varlen prefill: every block takes one item of a work list, a tile of query tokens of one request.

Legend: T query rows, H query heads, HK kv heads, D head size, R requests, W work items.
"""

from typing import Any

import tilelang.language as T

from tl_backend.configs.tile import TileConfig
from tl_backend.kernels.dialect import Dialect, rows, vector
from tl_backend.kernels.tile import ACCUM, LOG2E, kv_shape, tile_program
from tl_backend.problem import AttentionProblem


def prefill(problem: AttentionProblem, config: TileConfig, dialect: Dialect) -> Any:
    """The prim_func.

    Q ``[T, H, D]``, KV ``[num_blocks, HK, page, 2 * D]``, O ``[T, H, D]``, block_table int32 ``[R, max_blocks]``,
    cu_seqlens_q int32 ``[R + 1]``, seq_lens int32 ``[R]``, work int32 ``[W, 2]`` of (request, first token), longest
    first.
    """
    program = tile_program(problem, config, dialect)
    block_m, heads, tokens = config.block_m, config.heads_per_tile, config.tokens_per_tile
    block_n, causal, dtype, head_dim = config.block_n, problem.causal, problem.dtype, problem.head_dim
    group, num_heads, num_kv_heads = problem.group_size, problem.num_q_heads, problem.num_kv_heads
    head_tiles = config.head_tiles(problem)
    lanes = num_kv_heads * head_tiles

    @T.prim_func
    def prefill_kernel(
        q_ptr: T.ptr,
        kv_ptr: T.ptr,
        o_ptr: T.ptr,
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
        kv_stride_b: T.int64,
        kv_stride_h: T.int64,
        kv_stride_s: T.int64,
        o_stride_t: T.int64,
        o_stride_h: T.int64,
        block_table_stride: T.int64,
    ):
        Q = dialect.tensor(q_ptr, [num_heads, head_dim], dtype, [q_stride_t, q_stride_h])
        KV = dialect.tensor(kv_ptr, kv_shape(problem), dtype, [kv_stride_b, kv_stride_h, kv_stride_s])
        O = dialect.tensor(o_ptr, [num_heads, head_dim], dtype, [o_stride_t, o_stride_h])
        block_table = rows(block_table_ptr, "int32", block_table_stride)
        cu_seqlens_q = vector(cu_seqlens_q_ptr, "int32")
        seq_lens = vector(seq_lens_ptr, "int32")
        work = vector(work_ptr, "int32")
        # kv heads vary fastest: blocks that run side by side share the request's block-table rows and query lines.
        with dialect.launch(num_work * lanes, config.threads) as block:
            q_MD = dialect.shared([block_m, head_dim], dtype)
            o_MD = dialect.fragment([block_m, head_dim], ACCUM)
            max_M = dialect.fragment([block_m], ACCUM)
            sum_M = dialect.fragment([block_m], ACCUM)
            item = block // lanes
            kv_head = block % lanes // head_tiles
            first_head = kv_head * group + block % head_tiles * heads
            last_head = (kv_head + 1) * group - 1
            request = work[2 * item]
            token0 = work[2 * item + 1]
            row0 = cu_seqlens_q[request] + token0
            query_len = cu_seqlens_q[request + 1] - cu_seqlens_q[request]
            # vLLM's dummy runs ask for longer sequences than their block table holds.
            seq_len = T.min(seq_lens[request], max_blocks * problem.page_size)
            position0 = seq_len - query_len + token0
            num_keys = T.min(seq_len, position0 + tokens) if causal else seq_len
            program.load_q(Q, q_MD, row0, first_head, T.min(row0 - token0 + query_len, num_rows) - 1, last_head)
            program.attend(
                q_MD, KV, block_table, o_MD, max_M, sum_M, request, kv_head, position0, seq_len,
                0, T.ceildiv(T.max(num_keys, 0), block_n), softmax_scale * LOG2E,
            )  # fmt: skip
            program.normalise(o_MD, sum_M)
            # Through shared memory, so that the store is of whole vectors.
            T.copy(o_MD, q_MD)
            for i, d in dialect.parallel(block_m, head_dim):
                if i < tokens * heads and token0 + i // heads < query_len and first_head + i % heads <= last_head:
                    O[row0 + i // heads, first_head + i % heads, d] = q_MD[i, d]

    return prefill_kernel
