"""The attention of one tile of query rows over a range of KV tiles: what prefill and decode share.

A tile has ``block_m`` rows; row i is token ``i // heads`` and head ``i % heads`` of one kv head's group, so that the
heads which share a kv head share its loads. Keys and values come in tiles of ``block_n`` keys, from the pages of a
cache, which may be smaller or larger than a tile, or from two contiguous tensors.

Legend: M tile rows, N keys of a KV tile, D head size.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_backend.configs.tile import TileConfig
from tl_backend.kernels.dialect import Dialect, packing
from tl_backend.kernels.fp8 import FORMATS
from tl_backend.problem import AttentionProblem

ACCUM = "float32"
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
# The running maximum starts here and not at -inf: a row that sees no key in its first tiles would compute inf - inf.
SCORE_FLOOR = -1e30


@dataclass(frozen=True)
class TileProgram:
    """Macros for one (problem, config, dialect). ``attend`` is the whole inner loop."""

    keys: Any
    values: Any
    sequence_length: Any
    attend: Any
    load_q: Any
    load_heads: Any
    add_sinks: Any
    normalise: Any
    log_sum_exp: Any
    first_tile: Any
    end_key: Any


def log_sum_exp(max_, sum_, scale_log2):
    """Base 2, of a row's maximum and sum; -inf for a row without keys. ``scale_log2`` makes scores exponents of 2."""
    return T.if_then_else(sum_ == 0, -T.infinity(ACCUM), max_ * scale_log2 + T.log2(sum_))


def tile_program(problem: AttentionProblem, config: TileConfig, dialect: Dialect) -> TileProgram:
    """Build the macros. They close over the problem and the config, which are constants of the trace."""
    block_m, block_n, heads = config.block_m, config.block_n, config.heads_per_tile
    head_dim, causal, dtype, num_kv_heads = problem.head_dim, problem.causal, problem.dtype, problem.num_kv_heads
    page_size, paged = problem.page_size, problem.is_paged
    # Where the values begin in a row of the tensor that holds them.
    value_column = head_dim if paged else 0
    parallel, stages, width = dialect.parallel, config.num_stages, config.coalesced_width
    window, soft_cap, float8 = problem.window, problem.soft_cap, FORMATS.get(problem.kv_dtype)
    scores_are_logits = soft_cap is not None or problem.has_alibi
    whole_tiles = config.copies_whole_tiles(problem)
    copy_options = {} if width is None else {"coalesced_width": T.int32(width)}
    # Of QK alone: PV takes its weights from the registers that QK has left them in, which packing lays out otherwise.
    packed = packing(config.k_pack)
    policy = T.GemmWarpPolicy.FullCol if config.splits_columns else T.GemmWarpPolicy.FullRow

    def keys(pointer, stride_b, stride_h, stride_s):
        """The cache ``[num_blocks, HK, page, 2 * D]``, or the keys ``[S, HK, D]`` with rows ``stride_b`` apart."""
        if paged:
            return dialect.kv_cache(pointer, problem, [stride_b, stride_h, stride_s])
        return dialect.tensor(pointer, [num_kv_heads, head_dim], dtype, [stride_b, stride_h])

    def values(K, pointer, stride_s, stride_h):
        """The cache again, or the values ``[S, HK, D]``. TileLang's wrapper wants a tensor for every pointer."""
        separate = dialect.tensor(pointer, [num_kv_heads, head_dim], dtype, [stride_s, stride_h])
        return K if paged else separate

    def sequence_length(seq_lens, block_table, request, max_blocks):
        if not paged:
            return block_table[request + 1, 0] - block_table[request, 0]
        # vLLM's dummy runs ask for longer sequences than their block table holds.
        return T.min(seq_lens[request], max_blocks * page_size)

    @T.macro
    def load_q(Q, q_MD, first_row, first_head, last_row, last_head):
        # Rows past the request's end repeat its last row: they are computed and never stored.
        for i, d in parallel(block_m, head_dim, width=width):
            q_MD[i, d] = Q[T.min(first_row + i // heads, last_row), T.min(first_head + i % heads, last_head), d]

    @T.macro
    def copy_kv(KV, block_table, tile_ND, request, kv_head, key0, column):
        if paged:
            T.copy(
                KV[
                    block_table[request, key0 // page_size],
                    kv_head,
                    key0 % page_size : key0 % page_size + block_n,
                    column : column + head_dim,
                ],
                tile_ND,
                **copy_options,
            )
        elif dialect.device.has_tma:
            # No variable for the row: TileLang 0.1.12 defines it in another branch than the TMA copy that reads it.
            T.copy(
                KV[
                    block_table[request, 0] + key0 : block_table[request, 0] + key0 + block_n,
                    kv_head,
                    0:head_dim,
                ],
                tile_ND,
            )
        else:
            # A block copy would be checked against the tensor's extent, which nobody knows.
            for j, d in parallel(block_n, head_dim, width=width):
                tile_ND[j, d] = KV[block_table[request, 0] + key0 + j, kv_head, d]

    def visible(key, position0, seq_len):
        """The key, or the nearest that some query from ``position0`` on may attend to."""
        key = T.min(key, seq_len - 1)
        return key if window is None else T.max(key, T.max(position0 - (window - 1), 0))

    @T.macro
    def gather_kv(KV, block_table, tile_ND, request, kv_head, key0, position0, seq_len, column):
        # Rows past the sequence's end repeat its last key, and rows before the window its first one: no block-table
        # entry past the end is read, and no slot that is not written yet, or freed and used by another, which may hold
        # NaN.
        # Element and store in one statement: through a variable, the load would be no cp.async.
        for j, d in parallel(block_n, head_dim, width=width):
            if not paged:
                tile_ND[j, d] = KV[block_table[request, 0] + visible(key0 + j, position0, seq_len), kv_head, d]
            elif float8 is None:
                tile_ND[j, d] = KV[
                    block_table[request, visible(key0 + j, position0, seq_len) // page_size],
                    kv_head,
                    visible(key0 + j, position0, seq_len) % page_size,
                    column + d,
                ]
            else:
                stored = KV[
                    block_table[request, visible(key0 + j, position0, seq_len) // page_size],
                    kv_head,
                    visible(key0 + j, position0, seq_len) % page_size,
                    column + d,
                ]
                tile_ND[j, d] = T.cast(float8.decode(stored), dtype)

    def to_log2(softmax_scale):
        """What turns a score into the exponent of 2."""
        return LOG2E if scores_are_logits else softmax_scale * LOG2E

    @T.macro
    def load_heads(values, values_M, first_head, last_head):
        for i in parallel(block_m):
            values_M[i] = T.cast(values[T.min(first_head + i % heads, last_head)], ACCUM)

    def last_key(position, seq_len):
        """The last key that a query at ``position`` attends to."""
        if causal:
            return T.min(position, seq_len - 1)
        return seq_len - 1 if window is None else T.min(position + (window - 1), seq_len - 1)

    def first_tile(position0):
        """The first KV tile that a tile of queries from ``position0`` on reads."""
        return 0 if window is None else T.max(position0 - (window - 1), 0) // block_n

    def end_key(position0, seq_len):
        """One past the last key that a tile of queries from ``position0`` on reads."""
        return T.max(last_key(position0 + (config.tokens_per_tile - 1), seq_len) + 1, 0)

    def needs_mask(key0, position0, seq_len):
        """Whether some query of the tile does not attend to some key of the KV tile at ``key0``."""
        cut_above = key0 + (block_n - 1) > last_key(position0, seq_len)
        if window is None:
            return cut_above
        return T.Or(cut_above, key0 < position0 + (config.tokens_per_tile - window))

    @T.macro
    def mask(s_MN, key0, position0, seq_len):
        for i, j in parallel(block_m, block_n):
            if window is None:
                s_MN[i, j] = T.if_then_else(
                    key0 + j <= last_key(position0 + i // heads, seq_len), s_MN[i, j], -T.infinity(ACCUM)
                )
            else:
                s_MN[i, j] = T.if_then_else(
                    T.And(
                        key0 + j <= last_key(position0 + i // heads, seq_len),
                        key0 + j > position0 + i // heads - window,
                    ),
                    s_MN[i, j],
                    -T.infinity(ACCUM),
                )

    @T.macro
    def to_logits(s_MN, slope_M, key0, position0, softmax_scale):
        if soft_cap is not None:
            # cap * tanh(x / cap) through exp, which is stable at any magnitude: exp overflows to inf, and the rest is
            # 0.
            for i, j in parallel(block_m, block_n):
                s_MN[i, j] = soft_cap - 2 * soft_cap / (
                    T.exp2(s_MN[i, j] * (softmax_scale * (2 * LOG2E / soft_cap))) + 1
                )
        else:
            for i, j in parallel(block_m, block_n):
                s_MN[i, j] = s_MN[i, j] * softmax_scale
        if problem.has_alibi:
            for i, j in parallel(block_m, block_n):
                if causal:
                    s_MN[i, j] = s_MN[i, j] + slope_M[i] * T.cast(key0 + j - position0 - i // heads, ACCUM)
                else:
                    s_MN[i, j] = s_MN[i, j] - slope_M[i] * T.cast(T.abs(key0 + j - position0 - i // heads), ACCUM)

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
        K,
        V,
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
        slope_M,
        softmax_scale,
    ):
        k_ND = dialect.shared([block_n, head_dim], dtype)
        v_ND = dialect.shared([block_n, head_dim], dtype)
        if whole_tiles:
            tail_ND = dialect.shared([block_n, head_dim], dtype)
        s_MN = dialect.fragment([block_m, block_n], ACCUM)
        weights = dialect.shared if config.splits_columns else dialect.fragment
        p_MN = weights([block_m, block_n], dtype)
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
                copy_kv(K, block_table, k_ND, request, kv_head, key0, 0)
            else:
                gather_kv(K, block_table, k_ND, request, kv_head, key0, position0, seq_len, 0)
            T.gemm(q_MD, k_ND, s_MN, transpose_B=True, policy=policy, clear_accum=True, **packed)
            if scores_are_logits:
                to_logits(s_MN, slope_M, key0, position0, softmax_scale)
            if needs_mask(key0, position0, seq_len):
                mask(s_MN, key0, position0, seq_len)
            online_softmax(s_MN, p_MN, o_MD, max_M, sum_M, prev_M, rescale_M, part_M, to_log2(softmax_scale))
            if whole_tiles:
                copy_kv(V, block_table, v_ND, request, kv_head, key0, value_column)
            else:
                gather_kv(V, block_table, v_ND, request, kv_head, key0, position0, seq_len, value_column)
            T.gemm(p_MN, v_ND, o_MD, policy=policy)
        if whole_tiles:
            if tile_end > full_end:
                key0 = full_end * block_n
                gather_kv(K, block_table, tail_ND, request, kv_head, key0, position0, seq_len, 0)
                T.gemm(q_MD, tail_ND, s_MN, transpose_B=True, policy=policy, clear_accum=True, **packed)
                if scores_are_logits:
                    to_logits(s_MN, slope_M, key0, position0, softmax_scale)
                mask(s_MN, key0, position0, seq_len)
                online_softmax(s_MN, p_MN, o_MD, max_M, sum_M, prev_M, rescale_M, part_M, to_log2(softmax_scale))
                gather_kv(V, block_table, tail_ND, request, kv_head, key0, position0, seq_len, value_column)
                T.gemm(p_MN, tail_ND, o_MD, policy=policy)

    @T.macro
    def add_sinks(sinks, o_MD, max_M, sum_M, first_head, last_head, softmax_scale):
        # A sink is one more key of no value: it can raise the maximum, and joins the sum.
        sink_M = dialect.fragment([block_m], ACCUM)
        shrink_M = dialect.fragment([block_m], ACCUM)
        load_heads(sinks, sink_M, first_head, last_head)
        for i in parallel(block_m):
            sink_M[i] = sink_M[i] * LOG2E / to_log2(softmax_scale)
            shrink_M[i] = T.exp2((max_M[i] - T.max(max_M[i], sink_M[i])) * to_log2(softmax_scale))
            max_M[i] = T.max(max_M[i], sink_M[i])
            sum_M[i] = sum_M[i] * shrink_M[i] + T.exp2((sink_M[i] - max_M[i]) * to_log2(softmax_scale))
        for i, d in parallel(block_m, head_dim):
            o_MD[i, d] = o_MD[i, d] * shrink_M[i]

    @T.macro
    def normalise(o_MD, sum_M, v_scale):
        # A row without keys has sum 0: its output is zero. NaN goes through, for a broken model to show.
        for i, d in parallel(block_m, head_dim):
            o_MD[i, d] = T.if_then_else(sum_M[i] == 0, 0, o_MD[i, d] * (v_scale / sum_M[i]))

    return TileProgram(
        keys=keys,
        values=values,
        sequence_length=sequence_length,
        attend=attend,
        load_q=load_q,
        load_heads=load_heads,
        add_sinks=add_sinks,
        normalise=normalise,
        log_sum_exp=lambda max_, sum_, softmax_scale: log_sum_exp(max_, sum_, to_log2(softmax_scale)),
        first_tile=first_tile,
        end_key=end_key,
    )
