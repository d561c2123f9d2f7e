"""Configs of the matmul that measures a device's ceiling."""

from __future__ import annotations

from dataclasses import dataclass

from tl_backend.configs.tile import ELEMENT_BYTES
from tl_backend.device import DeviceSpec
from tl_backend.errors import InvalidInputError, UnsupportedError, describe
from tl_backend.problem import DTYPES

# TileLang has no asynchronous copy to LDS there: a stage ahead waits in registers, and LDS holds one.
_PREFETCHES_TO_REGISTERS = ("gfx90a", "gfx942")


@dataclass(frozen=True, kw_only=True)
class GemmProblem:
    """``C[m, n] = sum over k of A[m, k] * B[n, k]``, summed in float32: a linear layer, both operands dense along k.

    Attributes:
        m, n, k: extents, all known when the kernel is compiled.
        dtype: of A, B and C.

    Raises:
        InvalidInputError: an extent is not positive.
        UnsupportedError: an unknown dtype, or a matrix of more elements than an int32 counts.
    """

    m: int
    n: int
    k: int
    dtype: str

    def __post_init__(self) -> None:
        shape = f"{self.m} x {self.n} x {self.k}"
        if min(self.m, self.n, self.k) < 1:
            raise InvalidInputError(
                describe(
                    "matmul", value=shape, limit="every extent is at least 1", remedy="Pass matrices with elements."
                )
            )
        if max(self.m * self.n, self.m * self.k, self.n * self.k) >= 2**31:
            limit = "a matrix has fewer than 2**31 elements"
            raise UnsupportedError(describe("matmul", value=shape, limit=limit, remedy="Multiply it in parts."))
        if self.dtype not in DTYPES:
            limit = f"{', '.join(DTYPES)} are supported"
            raise UnsupportedError(describe("matmul dtype", value=self.dtype, limit=limit, remedy="Convert A and B."))

    @property
    def flops(self) -> float:
        """A product and a sum for each term."""
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """Tiles of one block.

    Attributes:
        block_m, block_n: rows and columns of C that a block computes.
        block_k: terms of a step of the pipeline.
        num_stages: of the pipeline; 0 for none.
        threads: of a block, without the producer's that TileLang adds where TMA copies; ignored by the C target.
        panel: rows of blocks that run side by side before the next column's: they share B's tiles in the L2 cache.
        whole_rows: each warp has whole rows of a tile, and multiplies with all of B's: the widest wgmma and the least
            shared memory read. Else warps share rows and columns.
        k_pack: matrix instructions that one load from LDS feeds (AMD).
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    threads: int
    panel: int
    whole_rows: bool = False
    k_pack: int = 1

    def copies_whole_tiles(self, problem: GemmProblem) -> bool:
        """Whether no tile reaches over an edge, so that tiles are copied unchecked.

        Not where there is one step only: a pipeline of TMA copies with one iteration can wait for ever.
        """
        cut = problem.m % self.block_m or problem.n % self.block_n or problem.k % self.block_k
        return not cut and problem.k > self.block_k

    def stages_output(self, device: DeviceSpec) -> bool:
        """Whether C leaves through shared memory, where A and B were: for TMA, which stores whole tiles."""
        return device.has_tma

    def shared_memory(self, problem: GemmProblem, device: DeviceSpec) -> int:
        """Bytes: the buffers of A and B, or the tile of C in their place, and the two barriers of a stage."""
        buffers = max(1, self.num_stages)
        if device.arch in _PREFETCHES_TO_REGISTERS:
            buffers = 1
        elements = buffers * (self.block_m + self.block_n) * self.block_k
        if self.stages_output(device):
            elements = max(elements, self.block_m * self.block_n)
        return elements * ELEMENT_BYTES[problem.dtype] + (2 * 8 * buffers if device.has_tma else 0)

    def illegal_reason(self, problem: GemmProblem, device: DeviceSpec) -> str | None:
        """Why this config cannot run, or None."""
        needed, limit = self.shared_memory(problem, device), device.shared_memory_per_block
        if device.is_gpu and needed > limit:
            return f"needs {needed} bytes of shared memory; {device.arch} has {limit}"
        return None


def gemm_configs(problem: GemmProblem, device: DeviceSpec) -> tuple[GemmConfig, ...]:
    """The legal ones of a device's short list, best guess first: a ceiling is the best that any of them reaches."""
    candidates = _candidates(device)
    return tuple(config for config in candidates if config.illegal_reason(problem, device) is None)


def _candidates(device: DeviceSpec) -> list[GemmConfig]:
    def configs(
        *shapes: tuple[int, int, int, int, int], panel: int = 8, whole_rows: bool = False, k_pack: int = 1
    ) -> list[GemmConfig]:
        """Shapes: (block_m, block_n, block_k, num_stages, threads)."""
        return [
            GemmConfig(
                block_m=m,
                block_n=n,
                block_k=k,
                num_stages=stages,
                threads=threads,
                panel=panel,
                whole_rows=whole_rows,
                k_pack=k_pack,
            )
            for m, n, k, stages, threads in shapes
        ]

    if device.vendor == "cpu":
        return configs((32, 32, 32, 0, 1), (64, 64, 32, 0, 1))  # Tiles that stay in the L1 cache.
    if device.vendor == "amd":
        # 256 threads are one wave a SIMD; C of 256 x 256 takes half of their registers. On gfx950 TileLang makes one
        # instruction of twice the terms of two that are packed, and warns that it does.
        shapes = ((256, 256, 64, 0, 256), (256, 256, 32, 2, 256), (256, 128, 64, 2, 256), (128, 128, 64, 2, 256))
        return configs(*shapes, k_pack=2)
    if device.arch != "sm_90":
        return configs((128, 256, 32, 3, 256), (256, 128, 32, 3, 256), (128, 128, 32, 4, 128), (128, 128, 32, 2, 256))
    # Two warpgroups of 64 x 256 fill their registers with C. A stage of 128 x 256 x 64 moves 48 KiB for 1024 cycles of
    # wgmma, the least of all tiles that fit.
    widest = (128, 256, 64, 4, 256)
    return [
        *configs(widest, (128, 256, 128, 2, 256), (128, 256, 64, 3, 256), whole_rows=True),
        *configs(widest, whole_rows=True, panel=16),
        *configs(widest, (256, 128, 64, 4, 256)),
    ]
