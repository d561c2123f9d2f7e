"""What a consumer of Hopper's prefill does with its 64 rows of a query tile.

The order of FlashAttention-3 (Shah et al. 2024, section 3.2): QK of a tile is issued before PV of the one before, so
that the softmax between runs under a matmul; consumers take turns at the tensor cores by named barriers.

Legend: S slots of a ring, M rows of a tile, N keys of a KV tile, D head size.
"""

from typing import Any

import tilelang.language as T

from tl_backend.configs.prefill_hopper import (
    WARPGROUP,
    WARPGROUP_ROWS,
    HopperPrefillConfig,
    swizzled_columns,
)
from tl_backend.kernels.hopper import arrive_warp, heads_box, tma_store
from tl_backend.kernels.prefill_hopper_fp8 import VALUE_DTYPE
from tl_backend.kernels.prefill_notes import (
    FIRST_HEAD,
    FIRST_LIMIT,
    FIRST_ROW,
    FIRST_TILE,
    NUM_TILES,
    NUM_TOKENS,
    PIECE,
    PIECES,
    SLOT,
)
from tl_backend.kernels.tile import ACCUM, LN2, LOG2E, SCORE_FLOOR, log_sum_exp
from tl_backend.problem import AttentionProblem

# Named barriers: 1, 2, 3 pass the turn to a consumer, 4, 5, 6 are a consumer's own.
TURN, OWN = 1, 4
# A row's maximum is only moved where it grows by a factor of 2^8: weights stay below 256, which 16 bits hold as well as
# 1, and the output need not be rescaled at each tile. A row decides for itself, so that its bits are its own.
SLACK = 8.0


def consumer_program(problem: AttentionProblem, config: HopperPrefillConfig) -> Any:
    """The macro: all that the consumers do until no more items come."""
    block_m, block_n, warpgroups = config.block_m, config.block_n, config.warpgroups
    num_stages, q_stages, heads, tokens_each = (
        config.num_stages, config.q_stages, config.heads_per_tile, config.tokens_per_warpgroup,
    )  # fmt: skip
    head_dim, dtype, num_heads = problem.head_dim, problem.dtype, problem.num_q_heads
    causal, window, soft_cap = problem.causal, problem.window, problem.soft_cap
    has_sinks = problem.sinks_dtype is not None
    columns = swizzled_columns(head_dim)
    policy = T.GemmWarpPolicy.FullRow
    vectors = head_dim // 8
    quantized = problem.is_quantized

    def token(row):
        """Of a row of the tile; rows that are left over in a consumer's 64 get the next consumer's first."""
        return row // WARPGROUP_ROWS * tokens_each + row % WARPGROUP_ROWS // heads

    def is_row(row, num_tokens):
        """Whether a row of the tile is a query's."""
        if WARPGROUP_ROWS % heads == 0:
            return token(row) < num_tokens
        return T.And(row % WARPGROUP_ROWS // heads < tokens_each, token(row) < num_tokens)

    def head(row):
        return row % WARPGROUP_ROWS % heads

    @T.macro
    def cap_scores(s_MN, softmax_scale):
        # To tanh of the capped logits; what turns it into the exponent of 2 follows in scale_log2.
        for i, j in T.Parallel(block_m, block_n):
            if dtype == "bfloat16":
                # The hardware's, as FlashAttention-3 takes it: within 2^-11 of itself, bfloat16's own error is 2^-9.
                s_MN[i, j] = T.tanh(s_MN[i, j] * (softmax_scale / soft_cap))
            else:
                # Through exp2, which is stable at any magnitude: it overflows to inf, and the rest is 0.
                s_MN[i, j] = 1 - 2 / (T.exp2(s_MN[i, j] * (softmax_scale * (2 * LOG2E / soft_cap))) + 1)

    @T.macro
    def mask(s_MN, last_M, key0):
        # last_M: the last key that each row's token sees.
        for i, j in T.Parallel(block_m, block_n):
            if window is not None:
                s_MN[i, j] = T.if_then_else(
                    T.And(key0 + j <= last_M[i], key0 + j > last_M[i] - window), s_MN[i, j], -T.infinity(ACCUM)
                )
            else:
                s_MN[i, j] = T.if_then_else(key0 + j <= last_M[i], s_MN[i, j], -T.infinity(ACCUM))

    @T.macro
    def exponentiate(s_MN, s_MPQ, max_M, sums_MQ2, sums_MQ, scale_log2):
        # A row's sum stays in four parts, one a thread, until the last tile.
        for i, j in T.Parallel(block_m, block_n):
            s_MN[i, j] = T.exp2(s_MN[i, j] * scale_log2 - max_M[i] * scale_log2)
        T.reduce_sum(s_MPQ, sums_MQ2, dim=1)
        T.reduce_sum(sums_MQ2, sums_MQ, dim=2)

    @T.macro
    def rescale(o_MD, factor_M):
        for i, d in T.Parallel(block_m, head_dim):
            o_MD[i, d] = o_MD[i, d] * factor_M[i]

    @T.macro
    def step(
        masked, me, slot_q, index, key0, q_MD, q_SMD, k_SND, v_SND, s_MN, p_MN, o_MD, max_M, before_M, factor_M, last_M,
        part_MQ, s_MPQ, sums_MQ2, sum_MQ, softmax_scale, scale_log2, k_ready, k_free, v_ready, v_free,
    ):  # fmt: skip
        T.mbarrier_wait_parity(k_ready[index % num_stages], index // num_stages % 2)
        T.sync_threads(TURN + me, 2 * WARPGROUP)
        if config.q_in_registers:
            T.wgmma_gemm(q_MD, k_SND[index % num_stages, :, :], s_MN, transpose_B=True, policy=policy, clear_accum=True)
        else:
            T.wgmma_gemm(
                q_SMD[slot_q, :, :], k_SND[index % num_stages, :, :], s_MN,
                transpose_B=True, policy=policy, clear_accum=True,
            )  # fmt: skip
        T.mbarrier_wait_parity(v_ready[(index - 1) % num_stages], (index - 1) // num_stages % 2)
        T.wgmma_gemm(p_MN, v_SND[(index - 1) % num_stages, :, :], o_MD, policy=policy, clear_accum=False)
        T.named_barrier_arrive(TURN + (me + 1) % warpgroups, 2 * WARPGROUP)
        T.wait_wgmma(1)
        arrive_warp(k_free, index % num_stages)
        if soft_cap is not None:
            cap_scores(s_MN, softmax_scale)
        if masked:
            mask(s_MN, last_M, key0)
        T.copy(max_M, before_M)
        T.reduce_max(s_MN, max_M, dim=1, clear=False)
        grew = T.alloc_var("int32")
        grew = 0
        for i in T.Parallel(block_m):
            max_M[i] = T.if_then_else((max_M[i] - before_M[i]) * scale_log2 > SLACK, max_M[i], before_M[i])
            # Not as a difference of products: where both are the floor, a fused one leaves a rounding error of 1e22.
            factor_M[i] = T.exp2((before_M[i] - max_M[i]) * scale_log2)
            grew = grew | T.cast(max_M[i] > before_M[i], "int32")
        exponentiate(s_MN, s_MPQ, max_M, sums_MQ2, part_MQ, scale_log2)
        T.wait_wgmma(0)
        arrive_warp(v_free, (index - 1) % num_stages)
        for i, j in T.Parallel(block_m, 4):
            sum_MQ[i, j] = sum_MQ[i, j] * factor_M[i] + part_MQ[i, j]
        T.copy(s_MN, p_MN)
        if T.any_sync(grew) != 0:
            rescale(o_MD, factor_M)

    @T.macro
    def add_sinks(sinks, first_head, max_M, sum_M, factor_M, scale_log2):
        # A sink is one more key of no value: it can raise the maximum, and joins the sum. factor_M: what that does to
        # the output.
        for i in T.Parallel(block_m):
            factor_M[i] = T.cast(sinks[first_head + head(i)], ACCUM) * LOG2E / scale_log2
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
    def consume(
        notes, O, num_rows, strides, lse, sinks, k_scale, v_scale, partial_o, partial_lse, softmax_scale,
        q_SMD, k_SND, v_SND, q_ready, q_free, k_ready, k_free, v_ready, v_free,
    ):  # fmt: skip
        T.set_max_nreg(config.role_registers[0], 1)
        me = T.alloc_var("int32")
        me = T.shfl_sync(T.get_thread_binding() // WARPGROUP, 0)
        s_MN = T.alloc_fragment([block_m, block_n], ACCUM)
        p_MN = T.alloc_fragment([block_m, block_n], VALUE_DTYPE if quantized else dtype)
        q_MD = T.alloc_fragment([block_m, head_dim], dtype) if config.q_in_registers else None
        o_MD = T.alloc_fragment([block_m, head_dim], ACCUM)
        max_M = T.alloc_fragment([block_m], ACCUM)
        before_M = T.alloc_fragment([block_m], ACCUM)
        factor_M = T.alloc_fragment([block_m], ACCUM)
        sum_M = T.alloc_fragment([block_m], ACCUM)
        last_M = T.alloc_fragment([block_m], "int32")
        sums_MQ2 = T.alloc_fragment([block_m, 4, 2], ACCUM)
        part_MQ = T.alloc_fragment([block_m, 4], ACCUM)
        sum_MQ = T.alloc_fragment([block_m, 4], ACCUM)
        s_MPQ = T.reshape(s_MN, [block_m, block_n // 8, 4, 2])
        scale = T.alloc_var(ACCUM) if quantized else softmax_scale
        if quantized:
            scale = softmax_scale * k_scale[0]
        scale_log2 = T.alloc_var(ACCUM)
        scale_log2 = soft_cap * LOG2E if soft_cap is not None else scale * LOG2E
        done = T.alloc_var("int32", init=0)  # KV tiles.
        turn = T.alloc_var("int32", init=0)
        slot_q = T.alloc_var("int32", init=0)
        first_row = T.alloc_var("int32")
        num_tokens = T.alloc_var("int32")
        first_head = T.alloc_var("int32")
        limit = T.alloc_var("int32")
        clear_end = T.alloc_var("int32")
        pieces = T.alloc_var("int32")
        tiles = T.alloc_var("int32", init=1)
        if me == warpgroups - 1:
            T.named_barrier_arrive(TURN, 2 * WARPGROUP)
        while tiles > 0:
            slot_q = turn % q_stages
            T.mbarrier_wait_parity(q_ready[slot_q], turn // q_stages % 2)
            tiles = notes[slot_q, NUM_TILES]
            if tiles > 0:
                # From here on keys count from the first tile's first one.
                limit = notes[slot_q, FIRST_LIMIT] - notes[slot_q, FIRST_TILE] * block_n
                first_row = notes[slot_q, FIRST_ROW]
                num_tokens = notes[slot_q, NUM_TOKENS]
                first_head = notes[slot_q, FIRST_HEAD]
                pieces = notes[slot_q, PIECES]
                for i in T.Parallel(block_m):
                    last_M[i] = limit + token(i) if causal else limit
                if config.q_in_registers:
                    T.copy(q_SMD[slot_q, :, :], q_MD)
                T.fill(o_MD, 0)
                T.fill(max_M, SCORE_FLOOR)
                T.mbarrier_wait_parity(k_ready[done % num_stages], done // num_stages % 2)
                T.sync_threads(TURN + me, 2 * WARPGROUP)
                T.wgmma_gemm(
                    q_SMD[slot_q, :, :], k_SND[done % num_stages, :, :], s_MN,
                    transpose_B=True, policy=policy, clear_accum=True,
                )  # fmt: skip
                T.named_barrier_arrive(TURN + (me + 1) % warpgroups, 2 * WARPGROUP)
                T.wait_wgmma(0)
                arrive_warp(k_free, done % num_stages)
                if soft_cap is not None:
                    cap_scores(s_MN, scale)
                # Tiles from here on have keys that some of this consumer's queries do not see.
                clear_end = (limit + (me * tokens_each if causal else 0) + 1) // block_n
                if window is not None or clear_end < 1:
                    mask(s_MN, last_M, 0)
                T.reduce_max(s_MN, max_M, dim=1, clear=False)
                exponentiate(s_MN, s_MPQ, max_M, sums_MQ2, sum_MQ, scale_log2)
                T.copy(s_MN, p_MN)
                clear_end = 1 if window is not None else T.max(1, T.min(tiles, clear_end))
                for n in T.serial(1, clear_end):
                    step(
                        False, me, slot_q, done + n, 0, q_MD, q_SMD, k_SND, v_SND, s_MN, p_MN, o_MD, max_M,
                        before_M, factor_M, last_M, part_MQ, s_MPQ, sums_MQ2, sum_MQ, scale, scale_log2,
                        k_ready, k_free, v_ready, v_free,
                    )  # fmt: skip
                for n in T.serial(clear_end, tiles):
                    step(
                        True, me, slot_q, done + n, n * block_n, q_MD, q_SMD, k_SND, v_SND, s_MN, p_MN, o_MD, max_M,
                        before_M, factor_M, last_M, part_MQ, s_MPQ, sums_MQ2, sum_MQ, scale, scale_log2,
                        k_ready, k_free, v_ready, v_free,
                    )  # fmt: skip
                done = done + tiles
                T.mbarrier_wait_parity(v_ready[(done - 1) % num_stages], (done - 1) // num_stages % 2)
                T.wgmma_gemm(p_MN, v_SND[(done - 1) % num_stages, :, :], o_MD, policy=policy, clear_accum=False)
                T.reduce_sum(sum_MQ, sum_M, dim=1)
                T.wait_wgmma(0)
                arrive_warp(v_free, (done - 1) % num_stages)
                if has_sinks:
                    if pieces == 1:
                        add_sinks(sinks, first_head, max_M, sum_M, factor_M, scale_log2)
                        rescale(o_MD, factor_M)
                for i in T.Parallel(block_m):
                    # A row without keys is zero. NaN goes through, for a broken model to show.
                    factor_M[i] = T.if_then_else(sum_M[i] == 0, 0.0, (v_scale[0] if quantized else 1.0) / sum_M[i])
                rescale(o_MD, factor_M)
                # The loops below write a fragment too: TileLang then takes their layout from it, once. Of a loop that
                # only reads rows it plans a layout anew for each operation of the kernel, which takes seconds.
                if pieces == 1:
                    if problem.returns_lse:
                        for i in T.Parallel(block_m):
                            factor_M[i] = log_sum_exp(max_M[i], sum_M[i], scale_log2)
                            if is_row(i, num_tokens):
                                lse[first_head + head(i), first_row + token(i)] = LN2 * factor_M[i]
                    T.copy(o_MD, q_SMD[slot_q, :, :])
                    store_rows(O, num_rows, strides, q_SMD, slot_q, me, first_row, first_head, num_tokens)
                else:
                    for i in T.Parallel(block_m):
                        last_M[i] = T.if_then_else(
                            is_row(i, num_tokens),
                            (notes[slot_q, SLOT] + token(i) * pieces + notes[slot_q, PIECE]) * num_heads
                            + first_head
                            + head(i),
                            -1,
                        )
                    for i, d in T.Parallel(block_m, head_dim):
                        if last_M[i] >= 0:
                            partial_o[last_M[i], d] = o_MD[i, d]
                    for i in T.Parallel(block_m):
                        factor_M[i] = log_sum_exp(max_M[i], sum_M[i], scale_log2)
                        if last_M[i] >= 0:
                            partial_lse[last_M[i]] = factor_M[i]
                arrive_warp(q_free, slot_q)
                turn = turn + 1

    return consume
