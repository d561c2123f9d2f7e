"""How many blocks of a kernel one multiprocessor holds at a time, and what limits them."""

from __future__ import annotations

from dataclasses import dataclass

from tl_backend.device import DeviceSpec


@dataclass(frozen=True, kw_only=True)
class _Limits:
    """Of one multiprocessor. Attributes: shared_memory: bytes; threads, blocks: resident at once."""

    shared_memory: int
    threads: int
    blocks: int


# CUDA C++ Programming Guide, "Technical specifications per compute capability"; CDNA2 / CDNA3 / CDNA4 ISA documents:
# four SIMDs of eight waves, and barriers for 16 work-groups of more than a wave.
_LIMITS = {
    "sm_80": _Limits(shared_memory=164 * 1024, threads=2048, blocks=32),
    "sm_86": _Limits(shared_memory=100 * 1024, threads=1536, blocks=16),
    "sm_89": _Limits(shared_memory=100 * 1024, threads=1536, blocks=24),
    "sm_90": _Limits(shared_memory=228 * 1024, threads=2048, blocks=32),
    "sm_100": _Limits(shared_memory=228 * 1024, threads=2048, blocks=32),
    "sm_120": _Limits(shared_memory=100 * 1024, threads=1536, blocks=24),
    "gfx90a": _Limits(shared_memory=64 * 1024, threads=2048, blocks=16),
    "gfx942": _Limits(shared_memory=64 * 1024, threads=2048, blocks=16),
    "gfx950": _Limits(shared_memory=160 * 1024, threads=2048, blocks=16),
}
# NVIDIA: shared memory that the system takes from each block (since sm_80); 64 Ki registers of 32 bits in four parts,
# of each of which a warp takes units of 256.
_RESERVED = 1024
_REGISTERS, _REGISTER_UNIT, _PARTS = 65536, 256, 4
# AMD: 512 registers a lane of a SIMD, in units of 8.
_VECTOR_REGISTERS, _VECTOR_UNIT, _SIMDS = 512, 8, 4


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Attributes: blocks: resident on one multiprocessor; limit: what does not let in another."""

    blocks: int
    limit: str


def occupancy(
    device: DeviceSpec, *, shared_memory: int, threads: int, registers: int | None = None
) -> Occupancy | None:
    """Resident blocks of a kernel, or None where nothing is known of the architecture (a CPU).

    Args:
        shared_memory: bytes of a block, static and dynamic.
        threads: of a block.
        registers: of a thread; None where no compiler has said.
    """
    limits = _LIMITS.get(device.arch)
    if limits is None:
        return None
    waves = -(-threads // device.wave_size)
    reserved = _RESERVED if device.vendor == "nvidia" else 0
    resident = {
        "blocks": limits.blocks,
        "threads": limits.threads // (waves * device.wave_size),
        "shared memory": limits.shared_memory // max(1, shared_memory + reserved),
    }
    if registers:
        resident["registers"] = _waves_by_registers(device, registers) // waves
    limit = min(resident, key=lambda name: resident[name])
    return Occupancy(blocks=resident[limit], limit=limit)


def _waves_by_registers(device: DeviceSpec, registers: int) -> int:
    if device.vendor == "amd":
        return _SIMDS * (_VECTOR_REGISTERS // _round_up(registers, _VECTOR_UNIT))
    return _PARTS * (_REGISTERS // _PARTS // _round_up(registers * device.wave_size, _REGISTER_UNIT))


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
