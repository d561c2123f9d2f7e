"""The rules that prune a config space: small pure functions, each with a one-line reason that has its numbers.

A rule returns why a tile is broken or pointless, or None. What cannot run at all is ``TileConfig.illegal_reason``'s to
say; the rest here is what does not compile, spills, or wastes the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tl_backend.configs.key import MAX_TILE_KEYS
from tl_backend.configs.tile import TileConfig, heads_per_tile, packing_efficiency
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem


class Candidate(NamedTuple):
    """What a rule looks at."""

    tile: TileConfig
    problem: AttentionProblem
    device: DeviceSpec


Rule = Callable[[Candidate], str | None]

MMA_ROWS = 16  # Rows of a warp's or wave's matrix instruction (mma.m16n8k16, mfma 16x16x16).
MMA_COLUMNS = 8
WGMMA_ROWS, WARPGROUP = 64, 128
# 32-bit registers of a thread for accumulators. NVIDIA has 255, of which addresses, row state and operands take about
# 32. AMD has 512, of which they take about 306: assembled gfx942 code of a 128 x 64 tile of head size 128 on 256
# threads has 402 and no spill, and 96 of them are accumulators.
OTHER_REGISTERS = {"nvidia": 32, "amd": 306}
MAX_REGISTERS = {"nvidia": 255, "amd": 512}
REGISTER_FILE = 65536  # 32-bit registers of an NVIDIA multiprocessor.
MIN_ASYNC_ELEMENTS = 2  # Of 16 bits: cp.async moves 4 bytes or more.
SYNCHRONOUS_ARCHES = ("gfx90a", "gfx942")
MIN_PACKING = 0.5
# Head sizes at which 384 threads, the consumers of TMA copies, gather the tail of a tile in whole vectors.
WHOLE_VECTORS_OF_384 = (32, 48, 64, 96, 128)


def legal(candidate: Candidate) -> str | None:
    """What the kernel itself refuses: shared memory above all."""
    return candidate.tile.illegal_reason(candidate.problem, candidate.device)


def whole_waves(candidate: Candidate) -> str | None:
    """A part of a wave idles."""
    threads, wave = candidate.tile.threads, candidate.device.wave_size
    return f"{threads} threads are no multiple of a wave of {wave}" if threads % wave else None


def divides_tables(candidate: Candidate) -> str | None:
    """Tables hold pages by classes that are right for tiles which divide ``MAX_TILE_KEYS`` only."""
    keys = candidate.tile.block_n
    return f"{keys} keys a tile do not divide {MAX_TILE_KEYS}" if MAX_TILE_KEYS % keys else None


def rows_of_warps(candidate: Candidate) -> str | None:
    """Warps own whole rows in the matrix instruction's multiples, else TileLang finds no layout; or split columns."""
    tile, device = candidate.tile, candidate.device
    if not device.is_gpu:
        return None
    if tile.splits_columns:
        columns = MMA_COLUMNS * (tile.threads // device.wave_size)
        return f"{tile.block_n} columns for {columns} of the warps" if tile.block_n % columns else None
    if device.arch == "sm_90" and tile.block_m >= WGMMA_ROWS:
        if tile.threads % WARPGROUP or (tile.threads > WARPGROUP and tile.block_m * WARPGROUP != tile.threads * 64):
            return f"{tile.threads} threads on {tile.block_m} rows; {WARPGROUP} take {WGMMA_ROWS}"
        return None
    waves = tile.threads // device.wave_size
    if tile.block_m % (MMA_ROWS * waves):
        return f"{tile.block_m} rows for {waves} waves; each takes a multiple of {MMA_ROWS}"
    return None


def registers(candidate: Candidate) -> str | None:
    """Output and scores stay in registers: block_m * (head_dim + block_n) float32 of a block."""
    tile, vendor = candidate.tile, candidate.device.vendor
    if vendor == "cpu":
        return None
    limit = MAX_REGISTERS[vendor]
    if vendor == "nvidia":
        limit = min(limit, REGISTER_FILE // tile.threads)
    limit -= OTHER_REGISTERS[vendor]
    needed = accumulators(candidate)
    return f"{needed} accumulators a thread; about {limit} fit without spills" if needed > limit else None


def accumulators(candidate: Candidate) -> int:
    """Float32 registers of a thread for a tile's output and scores."""
    tile = candidate.tile
    return -(-tile.block_m * (candidate.problem.head_dim + tile.block_n) // tile.threads)


def stages(candidate: Candidate) -> str | None:
    """TileLang 0.1.12 and 0.1.15 pipeline TMA copies to any depth, other asynchronous copies to one stage."""
    tile, device = candidate.tile, candidate.device
    if device.arch in SYNCHRONOUS_ARCHES and tile.num_stages:
        return f"{tile.num_stages} stages on {device.arch}, which has no asynchronous copy: the code of 0"
    tma = device.has_tma and tile.copies_whole_tiles(candidate.problem)
    if device.is_gpu and tile.num_stages > 1 and not tma:
        return f"{tile.num_stages} stages of tiles that no TMA copies; 1 compiles"
    return None


def whole_vectors(candidate: Candidate) -> str | None:
    """Where a gather does not go evenly over the threads, it is no asynchronous copy, and 0.1.12 writes past it."""
    tile, head_dim = candidate.tile, candidate.problem.head_dim
    if candidate.device.vendor != "nvidia":
        return None
    if tile.copies_whole_tiles(candidate.problem):
        if tile.threads != 384 or head_dim in WHOLE_VECTORS_OF_384:
            return None
        return f"384 threads gather a tail at head sizes {WHOLE_VECTORS_OF_384}; this is {head_dim}"
    elements = tile.block_n * head_dim
    if elements % (tile.threads * MIN_ASYNC_ELEMENTS):
        return f"{elements} elements for {tile.threads} threads in accesses of {MIN_ASYNC_ELEMENTS} or more"
    return None


def packing(candidate: Candidate) -> str | None:
    """Rows that no query head uses are computed for nothing. The best packing of a group is always allowed."""
    tile, group = candidate.tile, candidate.problem.group_size
    useful = packing_efficiency(group, tile.heads_per_tile, tile.block_m)
    if useful < MIN_PACKING and tile.heads_per_tile != heads_per_tile(group, tile.block_m):
        return f"{useful:.0%} of the rows are useful; the limit is {MIN_PACKING:.0%}"
    return None


RULES: dict[str, Rule] = {
    "legal": legal,
    "waves": whole_waves,
    "tile keys": divides_tables,
    "rows of warps": rows_of_warps,
    "registers": registers,
    "stages": stages,
    "whole vectors": whole_vectors,
}
# A decode has one token a request: most of its rows are idle, whatever the tile.
PREFILL_RULES: dict[str, Rule] = RULES | {"packing": packing}
