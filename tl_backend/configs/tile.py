"""How one thread block walks a tile of query rows over KV tiles: the part of a config that prefill and decode share."""

from __future__ import annotations

from dataclasses import dataclass

from tl_backend.device import DeviceSpec
from tl_backend.errors import UnsupportedError, describe
from tl_backend.problem import AttentionProblem

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
MIN_PACKING_EFFICIENCY = 0.9


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """Tile shape of the portable kernels.

    Attributes:
        block_m: query rows of a tile; row i is token ``i // heads_per_tile``, head ``i % heads_per_tile``.
        block_n: keys of a KV tile.
        heads_per_tile: query heads of one kv head that share a tile.
        num_stages: depth of the K/V pipeline.
        threads: of a block; ignored by the C target.
        splits_columns: warps share the rows of a tile and split its columns, and the softmax's weights go through
            shared memory: for outputs of more columns than the registers of one warp hold.
    """

    block_m: int
    block_n: int
    heads_per_tile: int
    num_stages: int
    threads: int
    splits_columns: bool = False

    @property
    def tokens_per_tile(self) -> int:
        return self.block_m // self.heads_per_tile

    def head_tiles(self, problem: AttentionProblem) -> int:
        """Tiles that cover the query heads of one kv head."""
        return -(-problem.group_size // self.heads_per_tile)

    def copies_whole_tiles(self, problem: AttentionProblem) -> bool:
        """As the function, for this config's tile."""
        return copies_whole_tiles(problem, self.block_n)

    def shared_memory(self, problem: AttentionProblem, device: DeviceSpec) -> int:
        """Bytes of shared memory: Q, the stages of K and V, and what TileLang adds.

        The tail of whole tiles lies where K was. TileLang adds barriers where TMA copies, 16 bytes a stage each of K
        and V, and 8 bytes a thread, through which rows are reduced, on AMD and where warps split the columns.
        """
        stages = max(1, self.num_stages)
        elements = (self.block_m + 2 * self.block_n * stages) * problem.head_dim
        if self.splits_columns:
            elements += self.block_m * self.block_n
        tiles = elements * ELEMENT_BYTES[problem.dtype]
        reduction = 8 * self.threads if device.vendor == "amd" or self.splits_columns else 0
        barriers = 2 * 16 * stages if device.has_tma else 0
        return tiles + reduction + barriers

    def illegal_reason(self, problem: AttentionProblem, device: DeviceSpec) -> str | None:
        """Why this config cannot run, or None."""
        needed, limit = self.shared_memory(problem, device), device.shared_memory_per_block
        if device.is_gpu and needed > limit:
            return f"needs {needed} bytes of shared memory; {device.arch} has {limit}"
        if self.block_m % 16 or self.block_n % 16:
            return f"tile {self.block_m} x {self.block_n} is not a multiple of 16 x 16, the matrix instruction's shape"
        if not 1 <= self.heads_per_tile <= min(self.block_m, problem.group_size):
            return f"{self.heads_per_tile} heads in a tile of {self.block_m} rows and a group of {problem.group_size}"
        return None


def copies_whole_tiles(problem: AttentionProblem, block_n: int) -> bool:
    """Whether one block copy (TMA, where there is TMA) fetches a KV tile: where no tile crosses pages.

    Not where elements are converted on the way, nor where a tile may begin before the window, in slots that are freed.
    """
    crosses_pages = problem.page_size is not None and problem.page_size % block_n != 0
    return not crosses_pages and not problem.is_quantized and problem.window is None


def heads_per_tile(group_size: int, block_m: int) -> int:
    """The most query heads to put into one tile while at least 90% of its rows stay useful.

    Rows are lost where ``block_m`` is no multiple of the heads, and where the group is no multiple of them: 71 heads in
    tiles of 128 rows go as 3 x 25 (94.7% x 97.7%). One head a tile never loses any.
    """

    def efficiency(heads: int) -> float:
        tiles = -(-group_size // heads)
        return group_size / (tiles * heads) * (block_m // heads * heads) / block_m

    legal = range(1, min(group_size, block_m) + 1)
    return max(heads for heads in legal if heads == 1 or efficiency(heads) >= MIN_PACKING_EFFICIENCY)


def even_heads(group_size: int, block_m: int) -> int:
    """Query heads of a tile when a group is cut into as few equal tiles as hold it: 71 in 64 rows go as 2 x 36."""
    tiles = -(-group_size // block_m)
    return -(-group_size // tiles)


def wide_tiles(problem: AttentionProblem, device: DeviceSpec) -> list[TileConfig]:
    """Tiles for head sizes above 256, best first, for prefill and decode alike.

    64 rows of 512 output columns would fill the registers of one warpgroup: on NVIDIA two, or four warps of fewer rows,
    split the columns. A wave of AMD has twice the registers.
    """
    if device.vendor == "amd":
        shapes = [(64, 32, 256, False), (16, 16, 64, False)]  # gfx950; the 64 KiB of the others.
    elif device.arch == "sm_90":
        shapes = [(64, 64, 256, True)]
    else:
        shapes = [(32, 32, 128, True), (16, 32, 128, True)]  # The last where TMA needs barriers in 99 KiB.
    return [
        TileConfig(
            block_m=block_m,
            block_n=block_n,
            heads_per_tile=even_heads(problem.group_size, block_m),
            num_stages=0 if device.vendor == "amd" else 1,
            threads=threads,
            splits_columns=splits_columns,
        )
        for block_m, block_n, threads, splits_columns in shapes
    ]


def first_legal(candidates: list[TileConfig], problem: AttentionProblem, device: DeviceSpec) -> TileConfig:
    """The first candidate that can run.

    Raises:
        UnsupportedError: none can; the message gives each one's reason.
    """
    reasons = []
    for config in candidates:
        reason = config.illegal_reason(problem, device)
        if reason is None:
            return config
        reasons.append(f"{config.block_m} x {config.block_n}: {reason}")
    raise UnsupportedError(
        describe(
            f"head size {problem.head_dim} on {device.name}",
            value=f"no legal tile ({'; '.join(reasons)})",
            limit=f"{device.shared_memory_per_block} bytes of shared memory",
            remedy="Serve this model with another attention backend.",
        )
    )
