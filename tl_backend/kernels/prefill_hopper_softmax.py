"""The softmax of Hopper's prefill, as a consumer works it out for its 64 rows: cap, mask, maxima, weights.

The order of these and of the matmuls is ``kernels/prefill_hopper_consumer.py``'s; sinks and the division by the sum
come after the last tile (``kernels/prefill_hopper_epilogue.py``).

Legend: M rows of a tile, N keys of a KV tile, D head size; Q the 4 threads that share a row, P and 2 their columns.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_backend.configs.prefill_hopper import HopperPrefillConfig
from tl_backend.kernels.tile import ACCUM, LOG2E
from tl_backend.problem import AttentionProblem

# A row's maximum is only moved where it grows by a factor of 2^8: weights stay below 256, which 16 bits hold as well as
# 1, and the output need not be rescaled at each tile. A row decides for itself, so that its bits are its own.
SLACK = 8.0


@dataclass(frozen=True)
class SoftmaxProgram:
    """Macros for one (problem, config)."""

    cap_scores: Any
    mask: Any
    move_maxima: Any
    exponentiate: Any
    add_to_sums: Any
    rescale: Any


def softmax_program(problem: AttentionProblem, config: HopperPrefillConfig) -> SoftmaxProgram:
    """Build the macros. They close over the problem and the config, which are constants of the trace."""
    block_m, block_n, head_dim = config.block_m, config.block_n, problem.head_dim
    window, soft_cap = problem.window, problem.soft_cap

    @T.macro
    def cap_scores(s_MN, softmax_scale):
        # To tanh of the capped logits; what turns it into the exponent of 2 follows in scale_log2.
        for i, j in T.Parallel(block_m, block_n):
            if problem.dtype == "bfloat16":
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
    def move_maxima(s_MN, max_M, before_M, factor_M, scale_log2, grew: T.Ref):
        # factor_M: what that does to output and sum. grew: whether one of the thread's rows has moved.
        T.copy(max_M, before_M)
        T.reduce_max(s_MN, max_M, dim=1, clear=False)
        grew = 0
        for i in T.Parallel(block_m):
            max_M[i] = T.if_then_else((max_M[i] - before_M[i]) * scale_log2 > SLACK, max_M[i], before_M[i])
            # Not as a difference of products: where both are the floor, a fused one leaves a rounding error of 1e22.
            factor_M[i] = T.exp2((before_M[i] - max_M[i]) * scale_log2)
            grew = grew | T.cast(max_M[i] > before_M[i], "int32")

    @T.macro
    def exponentiate(s_MN, s_MPQ, max_M, sums_MQ2, sums_MQ, scale_log2):
        # A row's sum stays in four parts, one a thread, until the last tile.
        for i, j in T.Parallel(block_m, block_n):
            s_MN[i, j] = T.exp2(s_MN[i, j] * scale_log2 - max_M[i] * scale_log2)
        T.reduce_sum(s_MPQ, sums_MQ2, dim=1)
        T.reduce_sum(sums_MQ2, sums_MQ, dim=2)

    @T.macro
    def add_to_sums(sum_MQ, part_MQ, factor_M):
        for i, j in T.Parallel(block_m, 4):
            sum_MQ[i, j] = sum_MQ[i, j] * factor_M[i] + part_MQ[i, j]

    @T.macro
    def rescale(o_MD, factor_M):
        for i, d in T.Parallel(block_m, head_dim):
            o_MD[i, d] = o_MD[i, d] * factor_M[i]

    return SoftmaxProgram(
        cap_scores=cap_scores,
        mask=mask,
        move_maxima=move_maxima,
        exponentiate=exponentiate,
        add_to_sums=add_to_sums,
        rescale=rescale,
    )
