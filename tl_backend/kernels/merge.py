"""Merge two attentions of the same queries over disjoint keys: what each weighs follows from its log-sum-exp.

Legend: T query rows, H query heads, D head size.
"""

from typing import Any

import tilelang.language as T

from tl_backend.kernels.dialect import Dialect, rows
from tl_backend.kernels.tile import ACCUM, LN2, LOG2E
from tl_backend.problem import AttentionProblem


def merge(problem: AttentionProblem, threads: int, dialect: Dialect) -> Any:
    """The prim_func: one block a query row.

    A, B and O ``[T, H, D]``, of which O may be A or B; lse_a, lse_b and, with ``returns_lse``, lse float32 ``[H, T]``,
    natural log, -inf for a row without keys.
    """
    num_heads, head_dim, dtype = problem.num_q_heads, problem.head_dim, problem.dtype

    def weight(lse, highest):
        # Without keys on either side both are -inf, whose difference is NaN.
        return T.if_then_else(lse == -T.infinity(ACCUM), 0.0, T.exp2((lse - highest) * LOG2E))

    def mean(a, b, a_weight, b_weight):
        # What weighs nothing may hold anything.
        total = a_weight + b_weight
        part_a = T.if_then_else(a_weight == 0, 0.0, T.cast(a, ACCUM) * (a_weight / total))
        part_b = T.if_then_else(b_weight == 0, 0.0, T.cast(b, ACCUM) * (b_weight / total))
        return T.cast(part_a + part_b, dtype)

    @T.prim_func
    def merge_kernel(
        a_ptr: T.ptr,
        lse_a_ptr: T.ptr,
        b_ptr: T.ptr,
        lse_b_ptr: T.ptr,
        o_ptr: T.ptr,
        lse_ptr: T.ptr,
        num_rows: T.int32,
        a_stride_t: T.int64,
        a_stride_h: T.int64,
        b_stride_t: T.int64,
        b_stride_h: T.int64,
        o_stride_t: T.int64,
        o_stride_h: T.int64,
        lse_a_stride_h: T.int64,
        lse_b_stride_h: T.int64,
        lse_stride_h: T.int64,
    ):
        A = dialect.tensor(a_ptr, [num_heads, head_dim], dtype, [a_stride_t, a_stride_h])
        B = dialect.tensor(b_ptr, [num_heads, head_dim], dtype, [b_stride_t, b_stride_h])
        O = dialect.tensor(o_ptr, [num_heads, head_dim], dtype, [o_stride_t, o_stride_h])
        lse_a = rows(lse_a_ptr, ACCUM, lse_a_stride_h)
        lse_b = rows(lse_b_ptr, ACCUM, lse_b_stride_h)
        lse = rows(lse_ptr, ACCUM, lse_stride_h)
        with dialect.launch(num_rows, threads) as row:
            for h, d in dialect.parallel(num_heads, head_dim):
                highest = T.max(lse_a[h, row], lse_b[h, row])
                O[row, h, d] = mean(
                    A[row, h, d], B[row, h, d], weight(lse_a[h, row], highest), weight(lse_b[h, row], highest)
                )
            if problem.returns_lse:
                for h in dialect.parallel(num_heads):
                    top = T.max(lse_a[h, row], lse_b[h, row])
                    total = weight(lse_a[h, row], top) + weight(lse_b[h, row], top)
                    lse[h, row] = T.if_then_else(total == 0, -T.infinity(ACCUM), top + LN2 * T.log2(total))

    return merge_kernel
