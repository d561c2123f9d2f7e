"""Resident blocks, against figures worked out by hand."""

from __future__ import annotations

import pytest

from tl_backend.configs.occupancy import Occupancy, occupancy
from tl_backend.device import SHARED_MEMORY_PER_BLOCK, DeviceSpec


@pytest.mark.parametrize(
    ("arch", "shared_memory", "threads", "registers", "blocks", "limit"),
    [
        # 228 KiB hold two of 112 KiB and the system's 2 KiB.
        ("sm_90", 112 * 1024, 128, None, 2, "shared memory"),
        ("sm_90", 227 * 1024, 384, None, 1, "shared memory"),
        ("sm_80", 1024, 1024, None, 2, "threads"),
        ("sm_86", 1024, 1024, None, 1, "threads"),
        ("sm_90", 0, 32, None, 32, "blocks"),
        # 168 registers of 32 threads are 5376; a part's 16384 hold three warps, four parts three blocks of four.
        ("sm_90", 1024, 128, 168, 3, "registers"),
        ("sm_90", 1024, 512, 128, 1, "registers"),
        ("gfx942", 51200, 256, None, 1, "shared memory"),
        ("gfx950", 51200, 256, None, 3, "shared memory"),
        # 512 / 128 registers are four waves a SIMD; a block of four waves takes one of each.
        ("gfx942", 1024, 256, 128, 4, "registers"),
        ("gfx90a", 1024, 256, 8, 8, "threads"),
    ],
)
def test_resident_blocks(arch, shared_memory, threads, registers, blocks, limit) -> None:
    found = occupancy(DeviceSpec.absent(arch), shared_memory=shared_memory, threads=threads, registers=registers)
    assert found == Occupancy(blocks=blocks, limit=limit)


@pytest.mark.parametrize("arch", SHARED_MEMORY_PER_BLOCK)
def test_the_largest_block_is_resident_on_every_architecture(arch: str) -> None:
    device = DeviceSpec.absent(arch)
    found = occupancy(device, shared_memory=device.shared_memory_per_block, threads=128)
    assert found is not None
    assert found.blocks >= 1


def test_nothing_is_claimed_of_a_cpu() -> None:
    assert occupancy(DeviceSpec.absent("c"), shared_memory=0, threads=1) is None
