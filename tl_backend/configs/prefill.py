"""The default tile of the portable prefill on each kind of device."""

from __future__ import annotations

from tl_backend.configs.tile import TileConfig, copies_whole_tiles, first_legal, heads_per_tile, wide_tiles
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem


def default_prefill_config(problem: AttentionProblem, device: DeviceSpec) -> TileConfig:
    """The first legal tile of the device's preference list.

    Raises:
        UnsupportedError: no tile fits the device's shared memory.
    """
    if problem.head_dim > 256 and device.is_gpu:
        return first_legal(wide_tiles(problem, device), problem, device)
    return first_legal(
        [
            TileConfig(
                block_m=block_m,
                block_n=block_n,
                heads_per_tile=heads_per_tile(problem.group_size, block_m),
                num_stages=_num_stages(problem, block_n, device),
                threads=threads,
            )
            for block_m, block_n, threads in _shapes(problem, device)
        ],
        problem,
        device,
    )


def _shapes(problem: AttentionProblem, device: DeviceSpec) -> tuple[tuple[int, int, int], ...]:
    """(block_m, block_n, threads), best first."""
    if device.vendor == "cpu":
        return ((32, 32, 1),)  # Small tiles stay in the L1 cache.
    if device.vendor == "amd":
        # 256 threads are four waves. The last is for head size 256 in 64 KiB.
        return ((128, 64, 256), (64, 64, 256), (64, 32, 256), (64, 16, 256))
    if device.arch != "sm_90":
        return ((128, 64, 128), (64, 64, 128), (64, 32, 128), (64, 16, 128))
    # Hopper, measured on an H200 (B1 32/8 S8192 bf16). Where whole tiles are copied, TileLang makes one warpgroup the
    # producer, and the others run unsynchronised: with three, one's softmax hides behind the matmuls of two. Above head
    # size 128 the output takes the registers that 128 columns of scores would need.
    if problem.head_dim > 128:
        return ((128, 64, 256), (64, 64, 128), (64, 32, 128))
    if copies_whole_tiles(problem, 128):
        # 384 threads gather the tail of 128 keys in whole vectors only at these head sizes; at others (80, 112)
        # TileLang 0.1.12 lets the surplus threads write past their rows.
        return ((192, 128, 384), (128, 128, 256)) if problem.head_dim in (32, 48, 64, 96, 128) else ((128, 128, 256),)
    # The gather of small pages synchronises a block at every tile: several small blocks overlap each other instead.
    # Pages of 64 tokens get a tile that no page holds, since the gather of 128 keys beats the copy of 64 (409 against
    # 307 TFLOP/s).
    block_n = 128 if (problem.page_size or 0) % 64 == 0 else 64
    return ((64, block_n, 128), (64, 32, 128))


def _num_stages(problem: AttentionProblem, block_n: int, device: DeviceSpec) -> int:
    if not device.is_gpu or device.vendor == "amd":
        return 0
    # With one buffer the next tile's load starts as soon as its matmul has read it. A second pays where TMA fills it
    # and it costs no resident block: above head size 128.
    return 2 if device.arch == "sm_90" and problem.head_dim > 128 and copies_whole_tiles(problem, block_n) else 1
