"""Configs of the split-KV decode, and how many pieces to cut a request into."""

from __future__ import annotations

from dataclasses import dataclass

from tl_backend.configs.tile import TileConfig, even_heads, first_legal, wide_tiles
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Attributes: tile: shape of a block's tile; split: write partial outputs for a combine, not the output."""

    tile: TileConfig
    split: bool


@dataclass(frozen=True, kw_only=True)
class DecodeChoice:
    """What a table's row holds for a decode.

    Attributes:
        tile: of the kernel.
        blocks_per_multiprocessor: blocks to aim for on each, when requests are cut into pieces.
    """

    tile: TileConfig
    blocks_per_multiprocessor: int

    def illegal_reason(self, problem: AttentionProblem, device: DeviceSpec) -> str | None:
        """Why this config cannot run, or None."""
        if not 1 <= self.blocks_per_multiprocessor <= MAX_BLOCKS_PER_MULTIPROCESSOR:
            return f"{self.blocks_per_multiprocessor} blocks a multiprocessor; 1 to {MAX_BLOCKS_PER_MULTIPROCESSOR}"
        if self.tile.rasterisation or self.tile.num_split_q:
            order = f"rasterisation {self.tile.rasterisation}, num_split_q {self.tile.num_split_q}"
            return f"{order}: they order a prefill's work list, and are 0 in a decode"
        return self.tile.illegal_reason(problem, device)


# Blocks to aim for on each multiprocessor. Measured on an H200 (32/8, D 128, batch 1 and 8, contexts 512 ... 8192): two
# fill the memory system, and more only lengthen the combine.
BLOCKS_PER_MULTIPROCESSOR = 2
# Scratch grows with it.
MAX_BLOCKS_PER_MULTIPROCESSOR = 8
MIN_KEYS_PER_SPLIT = 128
MAX_SPLITS = 64


def default_decode_tile(problem: AttentionProblem, device: DeviceSpec) -> TileConfig:
    """The first legal tile of the device's preference list.

    Raises:
        UnsupportedError: no tile fits the device's shared memory.
    """
    if problem.head_dim > 256 and device.is_gpu:
        return first_legal(wide_tiles(problem, device), problem, device)
    if device.is_gpu:
        # 64 rows, though a group has fewer: each of four warps owns 16 whole rows, so that a row's softmax stays in its
        # warp.
        threads = 4 * device.wave_size
        shapes = [(64, 128, threads), (64, 64, threads), (64, 32, threads), (64, 16, threads)]
        if problem.head_dim > 128 or device.arch != "sm_90":  # Leave room for a second block.
            shapes = shapes[1:]
    else:
        shapes = [(16, 32, 1)]
    stages = 0 if device.vendor in ("cpu", "amd") else 1
    return first_legal(
        [
            TileConfig(
                block_m=block_m,
                block_n=block_n,
                heads_per_tile=even_heads(problem.group_size, block_m),
                num_stages=stages,
                threads=threads,
            )
            for block_m, block_n, threads in shapes
        ],
        problem,
        device,
    )


def default_decode_choice(problem: AttentionProblem, device: DeviceSpec) -> DecodeChoice:
    """The default tile, and two blocks a multiprocessor.

    Raises:
        UnsupportedError: no tile fits the device's shared memory.
    """
    return DecodeChoice(tile=default_decode_tile(problem, device), blocks_per_multiprocessor=BLOCKS_PER_MULTIPROCESSOR)


def combine_threads(problem: AttentionProblem) -> int:
    """Threads of a combine block: one an output element, rounded up to a power of two.

    TileLang finds no layout for more elements than threads where the one is no multiple of the other.
    """
    return max(64, 1 << (problem.head_dim - 1).bit_length())


def num_splits(
    num_requests: int, lanes: int, max_seqlen_k: int, device: DeviceSpec, blocks_per_multiprocessor: int
) -> int:
    """Pieces to cut each request's keys into, so that a small batch still fills the device.

    Args:
        num_requests: decode requests of the step.
        lanes: blocks of one request and piece (kv heads x head tiles).
        max_seqlen_k: the longest sequence, or an upper bound.
        blocks_per_multiprocessor: to aim for.
    """
    if num_requests == 0:
        return 1
    slots = blocks_per_multiprocessor * device.multiprocessors if device.is_gpu else 1
    wanted = slots // (num_requests * lanes)
    return max(1, min(wanted, max_seqlen_k // MIN_KEYS_PER_SPLIT, MAX_SPLITS))


def max_partials(max_num_requests: int, lanes: int, device: DeviceSpec, blocks_per_multiprocessor: int) -> int:
    """The most (request, piece) pairs that ``num_splits`` gives with two pieces or more: the size of the scratch."""
    slots = blocks_per_multiprocessor * device.multiprocessors if device.is_gpu else 1
    return min(slots // lanes, max_num_requests * MAX_SPLITS)
