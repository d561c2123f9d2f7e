"""The default tile of the portable prefill on each kind of device."""

from __future__ import annotations

from tl_backend.configs.tile import TileConfig, first_legal, heads_per_tile
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem


def default_prefill_config(problem: AttentionProblem, device: DeviceSpec) -> TileConfig:
    """The first legal tile of the device's preference list.

    Raises:
        UnsupportedError: no tile fits the device's shared memory.
    """
    shapes = _SHAPES[_kind(device)]
    return first_legal(
        [
            TileConfig(
                block_m=block_m,
                block_n=block_n,
                heads_per_tile=heads_per_tile(problem.group_size, block_m),
                num_stages=_num_stages(problem, block_n, device),
                threads=threads,
            )
            for block_m, block_n, threads in shapes
            if (block_m, block_n) not in _skipped(problem, device)
        ],
        problem,
        device,
    )


# (block_m, block_n, threads), best first. Hopper: two warpgroups of 64 rows. Ampere and Ada: a warp holds 32 rows, so that
# scores and output stay in registers. AMD: 256 threads are four waves. CPU: small tiles stay in the L1 cache.
_SHAPES = {
    "hopper": ((128, 128, 256), (128, 64, 256), (64, 64, 128)),
    "nvidia": ((128, 64, 128), (64, 64, 128), (64, 32, 128), (64, 16, 128)),
    "amd": ((128, 64, 256), (64, 64, 256), (64, 32, 256)),
    "cpu": ((32, 32, 1),),
}


def _kind(device: DeviceSpec) -> str:
    if device.vendor == "nvidia":
        return "hopper" if device.arch == "sm_90" else "nvidia"
    return device.vendor


def _num_stages(problem: AttentionProblem, block_n: int, device: DeviceSpec) -> int:
    if not device.is_gpu or device.vendor == "amd":
        return 0
    # TMA fills two stages ahead. The gather of small pages issues the next tile's cp.async after each matmul: one buffer.
    return 2 if device.arch == "sm_90" and problem.page_size % block_n == 0 else 1


def _skipped(problem: AttentionProblem, device: DeviceSpec) -> set[tuple[int, int]]:
    # Above head size 128 the output tile takes the registers that 128 columns of scores would need.
    return {(128, 128)} if problem.head_dim > 128 else set()
