"""The small vocabulary that lets one program serve CUDA, HIP and TileLang's C target.

A GPU keeps tiles in shared memory and register fragments and walks them with parallel loops. The C target has one
thread: every tile is a local array, and loops are plain grids (a local array must not be indexed by a parallel
variable). TileLang traces the Python of a program, so that a method of this class picks the construct at trace time.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_backend.device import DeviceSpec
from tl_backend.kernels.fp8 import FORMATS
from tl_backend.problem import AttentionProblem

# Elements that strides of global tensors are counted in on a GPU: 8 elements of 16 bits are the 16 bytes of one vector
# access. A stride passed in these units is provably aligned, so that TileLang emits 16-byte loads and cp.async.
GPU_STRIDE_UNIT = 8

# An extent that only the caller knows. Programs check their own bounds, so that nothing reads it.
ANY = 2**31 - 1


@dataclass(frozen=True)
class Dialect:
    """Constructs of one target."""

    device: DeviceSpec

    @property
    def stride_unit(self) -> int:
        """Elements a stride argument counts in: 8 on a GPU (16 bytes at 16 bits), 1 on the C target."""
        return GPU_STRIDE_UNIT if self.device.is_gpu else 1

    def launch(self, blocks: Any, threads: int) -> Any:
        return T.Kernel(blocks, threads=threads) if self.device.is_gpu else T.Kernel(blocks)

    def launch_grid(self, columns: Any, rows: Any, threads: int) -> Any:
        return T.Kernel(columns, rows, threads=threads) if self.device.is_gpu else T.Kernel(columns, rows)

    def rasterise(self, panel: int) -> Any:
        """A statement: the blocks of a grid run in panels, so that those side by side share tiles in a GPU's L2."""
        return T.use_swizzle(panel_size=panel) if self.device.is_gpu else None

    def shared(self, shape: list[int], dtype: str) -> Any:
        return T.alloc_shared(shape, dtype) if self.device.is_gpu else T.alloc_local(shape, dtype)

    def fragment(self, shape: list[int], dtype: str) -> Any:
        return T.alloc_fragment(shape, dtype) if self.device.is_gpu else T.alloc_local(shape, dtype)

    def parallel(self, *extents: int, width: int | None = None) -> Any:
        """Args: width: elements of one access to memory; None for TileLang's choice."""
        if not self.device.is_gpu:
            return T.grid(*extents)
        return T.Parallel(*extents) if width is None else T.Parallel(*extents, coalesced_width=T.int32(width))

    def tensor(self, pointer: Any, shape: list[int], dtype: str, strides: list[Any]) -> Any:
        """A global tensor at ``pointer`` whose first extent only the caller knows; ``shape`` holds the others.

        ``strides`` are int64 arguments in units of ``stride_unit``, which makes every offset 64-bit; the last dimension
        is dense.
        """
        return T.make_tensor(pointer, [ANY, *shape], dtype, strides=[s * self.stride_unit for s in strides] + [1])

    def kv_cache(self, pointer: Any, problem: AttentionProblem, strides: list[Any]) -> Any:
        """The cache ``[num_blocks, HK, page, 2 * D]`` at ``pointer``, 8-bit floats as their bits.

        ``strides`` are those of its blocks, heads and slots.
        """
        shape = [problem.num_kv_heads, problem.page_size, 2 * problem.head_dim]
        return self.tensor(pointer, shape, "uint8" if problem.kv_dtype in FORMATS else problem.kv_dtype, strides)


def packing(k_pack: int) -> dict[str, Any]:
    """The argument of ``T.gemm`` that packs matrix instructions along k; TileLang 0.1.12 and 0.1.15 differ in it."""
    if k_pack == 1:
        return {}
    option = {"k_pack": k_pack}
    return option if "k_pack" in inspect.signature(T.gemm).parameters else {"annotations": option}


def vector(pointer: Any, dtype: str) -> Any:
    """A dense global vector of unknown length at ``pointer``."""
    return T.make_tensor(pointer, [ANY], dtype)


def rows(pointer: Any, dtype: str, stride: Any) -> Any:
    """A global matrix at ``pointer`` with rows ``stride`` (int64) elements apart."""
    return T.make_tensor(pointer, [ANY, ANY], dtype, strides=[stride, 1])
