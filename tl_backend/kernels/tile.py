"""The attention of one tile of query rows over a range of KV tiles: what prefill and decode share.

A tile has ``block_m`` rows; row i is token ``i // heads`` and head ``i % heads`` of one kv head's group, so that the
heads which share a kv head share its loads. KV comes in tiles of ``block_n`` keys, which may be smaller or larger than
a page.

Legend: M tile rows, N keys of a KV tile, D head size.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_backend.configs.tile import TileConfig
from tl_backend.kernels.dialect import Dialect
from tl_backend.problem import AttentionProblem

ACCUM = "float32"
LOG2E = 1.4426950408889634
# The running maximum starts here and not at -inf: a row that sees no key in its first tiles would compute inf - inf.
SCORE_FLOOR = -1e30
FULL_ROW = T.GemmWarpPolicy.FullRow


@dataclass(frozen=True)
class TileProgram:
    """Macros for one (problem, config, dialect). ``attend`` is the whole inner loop."""

    attend: Any
    load_q: Any
    normalise: Any


def kv_shape(problem: AttentionProblem) -> list[int]:
    """Extents of the KV cache but for its number of blocks."""
    return [problem.num_kv_heads, problem.page_size, 2 * problem.head_dim]


def tile_program(problem: AttentionProblem, config: TileConfig, dialect: Dialect) -> TileProgram:
    """Build the macros. They close over the problem and the config, which are constants of the trace."""
    block_m, block_n, heads = config.block_m, config.block_n, config.heads_per_tile
    head_dim, page_size, causal, dtype = problem.head_dim, problem.page_size, problem.causal, problem.dtype
    parallel, stages = dialect.parallel, config.num_stages
    whole_tiles = config.copies_whole_tiles(problem)

    @T.macro
    def load_q(Q, q_MD, first_row, first_head, last_row, last_head):
        # Rows past the request's end repeat its last row: they are computed and never stored.
        for i, d in parallel(block_m, head_dim):
            q_MD[i, d] = Q[T.min(first_row + i // heads, last_row), T.min(first_head + i % heads, last_head), d]

    @T.macro
    def copy_kv(KV, block_table, tile_ND, request, kv_head, key0, column):
        T.copy(
            KV[
                block_table[request, key0 // page_size],
                kv_head,
                key0 % page_size : key0 % page_size + block_n,
                column : column + head_dim,
            ],
            tile_ND,
        )

    @T.macro
    def gather_kv(KV, block_table, tile_ND, request, kv_head, key0, seq_len, column):
        # Rows past the sequence's end repeat its last key: no block-table entry past the end is read, and no unwritten
        # slot, which may hold NaN.
        for j, d in parallel(block_n, head_dim):
            tile_ND[j, d] = KV[
                block_table[request, T.min(key0 + j, seq_len - 1) // page_size],
                kv_head,
                T.min(key0 + j, seq_len - 1) % page_size,
                column + d,
            ]

    @T.macro
    def mask(s_MN, key0, position0, seq_len):
        for i, j in parallel(block_m, block_n):
            if causal:
                s_MN[i, j] = T.if_then_else(
                    key0 + j <= T.min(position0 + i // heads, seq_len - 1), s_MN[i, j], -T.infinity(ACCUM)
                )
            else:
                s_MN[i, j] = T.if_then_else(key0 + j < seq_len, s_MN[i, j], -T.infinity(ACCUM))

    @T.macro
    def online_softmax(s_MN, p_MN, o_MD, max_M, sum_M, prev_M, rescale_M, part_M, scale_log2):
        T.copy(max_M, prev_M)
        T.reduce_max(s_MN, max_M, dim=1, clear=False)
        for i in parallel(block_m):
            rescale_M[i] = T.exp2((prev_M[i] - max_M[i]) * scale_log2)
        for i, j in parallel(block_m, block_n):
            s_MN[i, j] = T.exp2(s_MN[i, j] * scale_log2 - max_M[i] * scale_log2)
        T.reduce_sum(s_MN, part_M, dim=1)
        for i in parallel(block_m):
            sum_M[i] = sum_M[i] * rescale_M[i] + part_M[i]
        T.copy(s_MN, p_MN)
        for i, d in parallel(block_m, head_dim):
            o_MD[i, d] = o_MD[i, d] * rescale_M[i]

    @T.macro
    def attend(
        q_MD,
        KV,
        block_table,
        o_MD,
        max_M,
        sum_M,
        request,
        kv_head,
        position0,
        seq_len,
        tile_begin,
        tile_end,
        scale_log2,
    ):
        k_ND = dialect.shared([block_n, head_dim], dtype)
        v_ND = dialect.shared([block_n, head_dim], dtype)
        if whole_tiles:
            tail_ND = dialect.shared([block_n, head_dim], dtype)
        s_MN = dialect.fragment([block_m, block_n], ACCUM)
        p_MN = dialect.fragment([block_m, block_n], dtype)
        prev_M = dialect.fragment([block_m], ACCUM)
        rescale_M = dialect.fragment([block_m], ACCUM)
        part_M = dialect.fragment([block_m], ACCUM)
        T.fill(o_MD, 0)
        T.fill(sum_M, 0)
        T.fill(max_M, SCORE_FLOOR)
        # The pipelined loop copies whole tiles. The tile that holds the sequence's end is gathered, row by row, after
        # it.
        full_end = T.min(tile_end, T.max(seq_len // block_n, tile_begin)) if whole_tiles else tile_end
        for step in T.Pipelined(full_end - tile_begin, num_stages=stages):
            key0 = (tile_begin + step) * block_n
            if whole_tiles:
                copy_kv(KV, block_table, k_ND, request, kv_head, key0, 0)
            else:
                gather_kv(KV, block_table, k_ND, request, kv_head, key0, seq_len, 0)
            T.gemm(q_MD, k_ND, s_MN, transpose_B=True, policy=FULL_ROW, clear_accum=True)
            if key0 + block_n > T.min(position0 + 1, seq_len) if causal else key0 + block_n > seq_len:
                mask(s_MN, key0, position0, seq_len)
            online_softmax(s_MN, p_MN, o_MD, max_M, sum_M, prev_M, rescale_M, part_M, scale_log2)
            if whole_tiles:
                copy_kv(KV, block_table, v_ND, request, kv_head, key0, head_dim)
            else:
                gather_kv(KV, block_table, v_ND, request, kv_head, key0, seq_len, head_dim)
            T.gemm(p_MN, v_ND, o_MD, policy=FULL_ROW)
        if whole_tiles:
            if tile_end > full_end:
                gather_kv(KV, block_table, tail_ND, request, kv_head, full_end * block_n, seq_len, 0)
                T.gemm(q_MD, tail_ND, s_MN, transpose_B=True, policy=FULL_ROW, clear_accum=True)
                mask(s_MN, full_end * block_n, position0, seq_len)
                online_softmax(s_MN, p_MN, o_MD, max_M, sum_M, prev_M, rescale_M, part_M, scale_log2)
                gather_kv(KV, block_table, tail_ND, request, kv_head, full_end * block_n, seq_len, head_dim)
                T.gemm(p_MN, tail_ND, o_MD, policy=FULL_ROW)

    @T.macro
    def normalise(o_MD, sum_M):
        # A row without keys has sum 0: its output is zero.
        for i, d in parallel(block_m, head_dim):
            o_MD[i, d] = T.if_then_else(sum_M[i] > 0, o_MD[i, d] / sum_M[i], 0)

    return TileProgram(attend=attend, load_q=load_q, normalise=normalise)
