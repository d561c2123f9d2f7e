"""Matrix product of two matrices that are dense along the summed dimension: the matmul ceiling of a device.

Legend: M rows of A and C, N rows of B and columns of C, K terms; a tile is block_m x block_n x block_k of them.
"""

from typing import Any

import tilelang.language as T

from tl_backend.configs.gemm import GemmConfig, GemmProblem
from tl_backend.kernels.dialect import Dialect, packing
from tl_backend.kernels.tile import ACCUM


def gemm(problem: GemmProblem, config: GemmConfig, dialect: Dialect) -> Any:
    """The prim_func: A ``[m, k]``, B ``[n, k]``, C ``[m, n]``, all dense; one block a tile of C."""
    m, n, k, dtype = problem.m, problem.n, problem.k, problem.dtype
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    whole, parallel = config.copies_whole_tiles(problem), dialect.parallel
    packed, staged = packing(config.k_pack), config.stages_output(dialect.device)
    policy = T.GemmWarpPolicy.FullRow if config.whole_rows else T.GemmWarpPolicy.Square

    @T.macro
    def load(X, tile, row0, k0, num_rows, block_rows):
        if whole:
            T.copy(X[row0 : row0 + block_rows, k0 : k0 + block_k], tile)
        else:
            # What lies over an edge is nothing: it is neither read nor summed.
            for i, j in parallel(block_rows, block_k):
                tile[i, j] = T.if_then_else(
                    T.And(row0 + i < num_rows, k0 + j < k),
                    X[T.min(row0 + i, num_rows - 1), T.min(k0 + j, k - 1)],
                    T.cast(0, dtype),
                )

    @T.prim_func
    def gemm_kernel(a_ptr: T.ptr, b_ptr: T.ptr, c_ptr: T.ptr):
        A = T.make_tensor(a_ptr, [m, k], dtype)
        B = T.make_tensor(b_ptr, [n, k], dtype)
        C = T.make_tensor(c_ptr, [m, n], dtype)
        with dialect.launch_grid(T.ceildiv(n, block_n), T.ceildiv(m, block_m), config.threads) as (column, row):
            a_MK = dialect.shared([block_m, block_k], dtype)
            b_NK = dialect.shared([block_n, block_k], dtype)
            sum_MN = dialect.fragment([block_m, block_n], ACCUM)
            dialect.rasterise(config.panel)
            T.fill(sum_MN, 0)
            for step in T.Pipelined(T.ceildiv(k, block_k), num_stages=config.num_stages):
                load(A, a_MK, row * block_m, step * block_k, m, block_m)
                load(B, b_NK, column * block_n, step * block_k, n, block_n)
                T.gemm(a_MK, b_NK, sum_MN, transpose_B=True, policy=policy, **packed)
            if not whole:
                for i, j in parallel(block_m, block_n):
                    if row * block_m + i < m and column * block_n + j < n:
                        C[row * block_m + i, column * block_n + j] = T.cast(sum_MN[i, j], dtype)
            elif staged:
                c_MN = dialect.shared([block_m, block_n], dtype)
                T.copy(sum_MN, c_MN)
                T.copy(c_MN, C[row * block_m : (row + 1) * block_m, column * block_n : (column + 1) * block_n])
            else:
                T.copy(sum_MN, C[row * block_m : (row + 1) * block_m, column * block_n : (column + 1) * block_n])

    return gemm_kernel
