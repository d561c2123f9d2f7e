"""What a consumer of Hopper's prefill does after an item's last tile: sinks, the division by the sum, and the stores.

A tile that is whole goes to O and, where the problem has them, its log-sum-exps to lse; a piece of one that is split
goes to the partial outputs, whose combine adds the sinks (``kernels/prefill_combine.py``).

Legend: S slots of a ring, M rows of a tile, D head size.
"""

from typing import Any

import tilelang.language as T

from tl_backend.configs.prefill_hopper import WARPGROUP, WARPGROUP_ROWS, HopperPrefillConfig, swizzled_columns
from tl_backend.kernels.hopper import OWN, heads_box, tma_store
from tl_backend.kernels.prefill_hopper_notes import PIECE, SLOT
from tl_backend.kernels.prefill_hopper_rows import TileRows
from tl_backend.kernels.prefill_hopper_softmax import softmax_program
from tl_backend.kernels.tile import ACCUM, LN2, LOG2E, log_sum_exp
from tl_backend.problem import AttentionProblem


def epilogue_program(problem: AttentionProblem, config: HopperPrefillConfig) -> Any:
    """The macro, for one item."""
    block_m, heads, tokens_each = config.block_m, config.heads_per_tile, config.tokens_per_warpgroup
    head_dim, dtype, num_heads = problem.head_dim, problem.dtype, problem.num_q_heads
    columns = swizzled_columns(head_dim)
    vectors = head_dim // 8
    rows = TileRows(config)
    rescale = softmax_program(problem, config).rescale

    @T.macro
    def add_sinks(sinks, first_head, max_M, sum_M, factor_M, scale_log2):
        # A sink is one more key of no value: it can raise the maximum, and joins the sum. factor_M: what that does to
        # the output.
        for i in T.Parallel(block_m):
            factor_M[i] = T.cast(sinks[first_head + rows.head(i)], ACCUM) * LOG2E / scale_log2
        for i in T.Parallel(block_m):
            sum_M[i] = sum_M[i] * T.exp2((max_M[i] - T.max(max_M[i], factor_M[i])) * scale_log2) + T.exp2(
                (factor_M[i] - T.max(max_M[i], factor_M[i])) * scale_log2
            )
            factor_M[i] = T.max(max_M[i], factor_M[i])
        for i in T.Parallel(block_m):
            before = max_M[i]
            max_M[i] = factor_M[i]
            factor_M[i] = T.exp2((before - factor_M[i]) * scale_log2)

    @T.macro
    def store_rows(O, num_rows, strides, q_SMD, slot_q, me, first_row, first_head, num_tokens):
        # The query's slot holds the output now, and goes out whole, or token by token where the request ends in it.
        T.fence_proxy_async()
        T.sync_threads(OWN + me, WARPGROUP)
        if num_tokens >= (me + 1) * tokens_each:
            if T.get_thread_binding() % WARPGROUP == 0:
                for c in T.unroll(head_dim // columns):
                    T.evaluate(
                        tma_store(
                            heads_box(O, dtype, head_dim, num_heads, num_rows, strides, heads, tokens_each),
                            T.access_ptr(q_SMD[slot_q, me * WARPGROUP_ROWS, c * columns], "r"),
                            c * columns, first_head, first_row + me * tokens_each,
                        )
                    )  # fmt: skip
                T.tma_store_arrive()
                T.tma_store_wait(0)
        else:
            for n in T.serial(WARPGROUP_ROWS * vectors // WARPGROUP):
                row = (n * WARPGROUP + T.get_thread_binding() % WARPGROUP) // vectors
                vector = (n * WARPGROUP + T.get_thread_binding() % WARPGROUP) % vectors
                if row // heads < tokens_each and me * tokens_each + row // heads < num_tokens:
                    for e in T.vectorized(8):
                        O[first_row + me * tokens_each + row // heads, first_head + row % heads, vector * 8 + e] = (
                            q_SMD[slot_q, me * WARPGROUP_ROWS + row, vector * 8 + e]
                        )
            T.fence_proxy_async()

    @T.macro
    def finish(
        slot_q: T.Ref, me: T.Ref, first_row: T.Ref, first_head: T.Ref, num_tokens: T.Ref, pieces: T.Ref,
        scale_log2: T.Ref, notes, o_MD, max_M, sum_M, factor_M, last_M, q_SMD,
        O, num_rows, strides, lse, sinks, v_scale, partial_o, partial_lse,
    ):  # fmt: skip
        # The caller's variables by reference: by value each would be copied. factor_M and last_M are scratch here.
        if problem.sinks_dtype is not None:
            if pieces == 1:
                add_sinks(sinks, first_head, max_M, sum_M, factor_M, scale_log2)
                rescale(o_MD, factor_M)
        for i in T.Parallel(block_m):
            # A row without keys is zero. NaN goes through, for a broken model to show.
            factor_M[i] = T.if_then_else(sum_M[i] == 0, 0.0, (v_scale[0] if problem.is_quantized else 1.0) / sum_M[i])
        rescale(o_MD, factor_M)
        # The loops below write a fragment too: TileLang then takes their layout from it, once. Of a loop that only
        # reads rows it plans a layout anew for each operation of the kernel, which takes seconds.
        if pieces == 1:
            if problem.returns_lse:
                for i in T.Parallel(block_m):
                    factor_M[i] = log_sum_exp(max_M[i], sum_M[i], scale_log2)
                    if rows.is_query(i, num_tokens):
                        lse[first_head + rows.head(i), first_row + rows.token(i)] = LN2 * factor_M[i]
            T.copy(o_MD, q_SMD[slot_q, :, :])
            store_rows(O, num_rows, strides, q_SMD, slot_q, me, first_row, first_head, num_tokens)
        else:
            for i in T.Parallel(block_m):
                last_M[i] = T.if_then_else(
                    rows.is_query(i, num_tokens),
                    (notes[slot_q, SLOT] + rows.token(i) * pieces + notes[slot_q, PIECE]) * num_heads
                    + first_head
                    + rows.head(i),
                    -1,
                )
            for i, d in T.Parallel(block_m, head_dim):
                if last_M[i] >= 0:
                    partial_o[last_M[i], d] = o_MD[i, d]
            for i in T.Parallel(block_m):
                factor_M[i] = log_sum_exp(max_M[i], sum_M[i], scale_log2)
                if last_M[i] >= 0:
                    partial_lse[last_M[i]] = factor_M[i]

    return finish
