"""Merge of the pieces that one row's keys were cut into: what the combines of decode and prefill share."""

from typing import Any

import tilelang.language as T

from tl_backend.kernels.dialect import Dialect
from tl_backend.kernels.tile import ACCUM, LN2, LOG2E
from tl_backend.problem import AttentionProblem


def pieces_program(problem: AttentionProblem, dialect: Dialect) -> Any:
    """The macro: of one query row and head, whose pieces lie one after another.

    partial_o float32 ``[pieces of all rows and heads, D]``, partial_lse float32, base 2, the same; heads vary fastest.
    """
    head_dim, num_heads, dtype = problem.head_dim, problem.num_q_heads, problem.dtype
    has_sinks = problem.sinks_dtype is not None

    @T.macro
    def merge_pieces(O, lse, sinks, partial_o, partial_lse, row, head, first, pieces):
        o_D = dialect.fragment([head_dim], ACCUM)
        highest = T.alloc_local([1], ACCUM)
        total = T.alloc_local([1], ACCUM)
        # The sink joins here, once, whatever the pieces.
        highest[0] = T.cast(sinks[head], ACCUM) * LOG2E if has_sinks else -T.infinity(ACCUM)
        T.fill(o_D, 0)
        for piece in T.serial(pieces):
            highest[0] = T.max(highest[0], partial_lse[(first + piece) * num_heads + head])
        # A sink of -inf, or a piece without keys, weighs nothing. With no key at all the sum stays 0.
        if has_sinks:
            total[0] = T.if_then_else(
                highest[0] == -T.infinity(ACCUM), 0.0, T.exp2(T.cast(sinks[head], ACCUM) * LOG2E - highest[0])
            )
        else:
            total[0] = 0
        for piece in T.serial(pieces):
            place = (first + piece) * num_heads + head
            weight = T.if_then_else(
                partial_lse[place] == -T.infinity(ACCUM), 0.0, T.exp2(partial_lse[place] - highest[0])
            )
            total[0] = total[0] + weight
            for d in dialect.parallel(head_dim):
                o_D[d] = o_D[d] + weight * partial_o[place, d]
        for d in dialect.parallel(head_dim):
            O[row, head, d] = T.cast(T.if_then_else(total[0] == 0, 0, o_D[d] / total[0]), dtype)
        if problem.returns_lse:
            lse[head, row] = T.if_then_else(total[0] == 0, -T.infinity(ACCUM), LN2 * (highest[0] + T.log2(total[0])))

    return merge_pieces
