"""What a consumer of Hopper's prefill, a warpgroup, does with its 64 rows of a query tile: the walk over KV tiles.

The order of FlashAttention-3 (Shah et al. 2024, section 3.2): QK of a tile is issued before PV of the one before, so
that the softmax between (``kernels/prefill_hopper_softmax.py``) runs under a matmul; consumers take turns at the tensor
cores by named barriers. What follows the last tile is in ``kernels/prefill_hopper_epilogue.py``, which token and head a
row is in ``kernels/prefill_hopper_rows.py``, and where items and tiles come from in ``kernels/prefill_hopper.py``.

Legend: S slots of a ring, M rows of a tile, N keys of a KV tile, D head size; Q the 4 threads that share a row, P and 2
their columns.
"""

from typing import Any

import tilelang.language as T

from tl_backend.configs.prefill_hopper import WARPGROUP, HopperPrefillConfig
from tl_backend.kernels.hopper import TURN, arrive_warp
from tl_backend.kernels.prefill_hopper_epilogue import epilogue_program
from tl_backend.kernels.prefill_hopper_fp8 import VALUE_DTYPE
from tl_backend.kernels.prefill_hopper_notes import (
    FIRST_HEAD,
    FIRST_LIMIT,
    FIRST_ROW,
    FIRST_TILE,
    NUM_TILES,
    NUM_TOKENS,
    PIECES,
)
from tl_backend.kernels.prefill_hopper_rows import TileRows
from tl_backend.kernels.prefill_hopper_softmax import softmax_program
from tl_backend.kernels.tile import ACCUM, LOG2E, SCORE_FLOOR
from tl_backend.problem import AttentionProblem


def consumer_program(problem: AttentionProblem, config: HopperPrefillConfig) -> Any:
    """The macro: all that the consumers do until no more items come."""
    block_m, block_n, warpgroups = config.block_m, config.block_n, config.warpgroups
    num_stages, q_stages, tokens_each = config.num_stages, config.q_stages, config.tokens_per_warpgroup
    head_dim, dtype = problem.head_dim, problem.dtype
    causal, window, soft_cap = problem.causal, problem.window, problem.soft_cap
    policy = T.GemmWarpPolicy.FullRow
    quantized = problem.is_quantized
    rows, softmax = TileRows(config), softmax_program(problem, config)
    finish = epilogue_program(problem, config)

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
            softmax.cap_scores(s_MN, softmax_scale)
        if masked:
            softmax.mask(s_MN, last_M, key0)
        grew = T.alloc_var("int32")
        softmax.move_maxima(s_MN, max_M, before_M, factor_M, scale_log2, grew)
        softmax.exponentiate(s_MN, s_MPQ, max_M, sums_MQ2, part_MQ, scale_log2)
        T.wait_wgmma(0)
        arrive_warp(v_free, (index - 1) % num_stages)
        softmax.add_to_sums(sum_MQ, part_MQ, factor_M)
        T.copy(s_MN, p_MN)
        if T.any_sync(grew) != 0:
            softmax.rescale(o_MD, factor_M)

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
                    last_M[i] = limit + rows.token(i) if causal else limit
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
                    softmax.cap_scores(s_MN, scale)
                # Tiles from here on have keys that some of this consumer's queries do not see.
                clear_end = (limit + (me * tokens_each if causal else 0) + 1) // block_n
                if window is not None or clear_end < 1:
                    softmax.mask(s_MN, last_M, 0)
                T.reduce_max(s_MN, max_M, dim=1, clear=False)
                softmax.exponentiate(s_MN, s_MPQ, max_M, sums_MQ2, sum_MQ, scale_log2)
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
                finish(
                    slot_q, me, first_row, first_head, num_tokens, pieces, scale_log2, notes,
                    o_MD, max_M, sum_M, factor_M, last_M, q_SMD, O, num_rows, strides, lse, sinks, v_scale,
                    partial_o, partial_lse,
                )  # fmt: skip
                arrive_warp(q_free, slot_q)
                turn = turn + 1

    return consume
