"""How one thread block walks a tile of query rows over KV tiles: the part of a config that prefill and decode share."""

from __future__ import annotations

from dataclasses import dataclass

from tl_backend.device import DeviceSpec
from tl_backend.errors import UnsupportedError, describe
from tl_backend.problem import AttentionProblem

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
MIN_PACKING_EFFICIENCY = 0.9
MATRIX_K = 16  # Elements along k of a matrix instruction of 16-bit operands.
# Narrower accesses than the 8 elements of 16 bits in 16 bytes, which are TileLang's own choice.
COALESCED_WIDTHS = (2, 4)


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
        k_pack: matrix instructions of QK that AMD packs along k, for operands to come from LDS in wider loads; 1 or 2.
        coalesced_width: elements that a thread moves at once between memory and LDS; None for TileLang's choice.
        rasterisation: lanes (a kv head and a part of its query heads) of a panel. A prefill walks all its work on one
            panel before the next, so that fewer heads' keys have to stay in the L2 cache; 0 for all lanes in one.
        num_split_q: blocks that share the work of a lane in a prefill, each walking some of it; 0 for a block an item.
    """

    block_m: int
    block_n: int
    heads_per_tile: int
    num_stages: int
    threads: int
    splits_columns: bool = False
    k_pack: int = 1
    coalesced_width: int | None = None
    rasterisation: int = 0
    num_split_q: int = 0

    @property
    def tokens_per_tile(self) -> int:
        return self.block_m // self.heads_per_tile

    def head_tiles(self, problem: AttentionProblem) -> int:
        """Tiles that cover the query heads of one kv head."""
        return -(-problem.group_size // self.heads_per_tile)

    def copies_whole_tiles(self, problem: AttentionProblem) -> bool:
        """As the function, for this config's tile.

        Not in a loop over work: there its pipeline costs registers and shared memory, and the gather costs neither.
        """
        return not self.num_split_q and copies_whole_tiles(problem, self.block_n)

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
        if self.num_split_q and self.num_stages:
            reduction *= 2  # Inside a loop over work, the pipeline's last tile reduces through bytes of its own.
        barriers = 2 * 16 * stages if device.has_tma and self.copies_whole_tiles(problem) else 0
        return tiles + reduction + barriers

    def illegal_reason(self, problem: AttentionProblem, device: DeviceSpec) -> str | None:
        """Why this config cannot run, or None."""
        if min(self.block_m, self.block_n) < 16 or self.block_m % 16 or self.block_n % 16:
            return f"tile {self.block_m} x {self.block_n} is not a multiple of 16 x 16, the matrix instruction's shape"
        if self.threads < 1:
            return f"{self.threads} threads; at least 1"
        needed, limit = self.shared_memory(problem, device), device.shared_memory_per_block
        if device.is_gpu and needed > limit:
            return f"needs {needed} bytes of shared memory; {device.arch} has {limit}"
        if not 1 <= self.heads_per_tile <= min(self.block_m, problem.group_size):
            return f"{self.heads_per_tile} heads in a tile of {self.block_m} rows and a group of {problem.group_size}"
        return self._illegal_order(problem) or self._illegal_access(problem, device)

    def _illegal_order(self, problem: AttentionProblem) -> str | None:
        """Of rasterisation and num_split_q, which both change the order of a prefill's work."""
        lanes = problem.num_kv_heads * self.head_tiles(problem)
        if min(self.rasterisation, self.num_split_q) < 0:
            return f"rasterisation {self.rasterisation} and num_split_q {self.num_split_q}; neither is negative"
        if self.rasterisation and self.num_split_q:
            return f"rasterisation {self.rasterisation} orders blocks that num_split_q {self.num_split_q} has walk"
        if self.rasterisation >= max(lanes, 1):
            return f"panels of {self.rasterisation} lanes; there are {lanes}, and all in one panel is 0"
        return None

    def _illegal_access(self, problem: AttentionProblem, device: DeviceSpec) -> str | None:
        """Of k_pack and coalesced_width, which targets without them ignore."""
        if self.k_pack not in (1, 2) or (self.k_pack == 2 and device.vendor != "amd"):
            return f"k_pack {self.k_pack} on {device.arch}; AMD packs 1 or 2 matrix instructions, others 1"
        if problem.head_dim % (MATRIX_K * self.k_pack):
            return f"k_pack {self.k_pack} on head size {problem.head_dim}; a multiple of {MATRIX_K * self.k_pack}"
        if self.coalesced_width is None:
            return None
        if self.coalesced_width not in COALESCED_WIDTHS or not device.is_gpu:
            widths = ", ".join(map(str, COALESCED_WIDTHS)) if device.is_gpu else "None"
            return f"coalesced_width {self.coalesced_width} on {device.arch}; {widths}, or TileLang's choice"
        if device.has_tma and self.copies_whole_tiles(problem):
            return f"coalesced_width {self.coalesced_width} of tiles that TMA copies; TileLang's choice"
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
    legal = range(1, min(group_size, block_m) + 1)
    return max(
        heads
        for heads in legal
        if heads == 1 or packing_efficiency(group_size, heads, block_m) >= MIN_PACKING_EFFICIENCY
    )


def packing_efficiency(group_size: int, heads: int, block_m: int) -> float:
    """The part of a tile's rows that query heads use."""
    tiles = -(-group_size // heads)
    return group_size / (tiles * heads) * (block_m // heads * heads) / block_m


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
