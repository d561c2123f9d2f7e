"""Configs of Hopper's own prefill: what the family takes, the default of a problem, and what a tile costs."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tl_backend.configs.tile import ELEMENT_BYTES, MIN_PACKING_EFFICIENCY
from tl_backend.device import DeviceSpec
from tl_backend.errors import UnsupportedError
from tl_backend.problem import AttentionProblem

WARPGROUP, WARPGROUP_ROWS, WARP = 128, 64, 32
MAX_KEYS = 256  # Of a TMA box and of one WGMMA.
# Registers of a thread after reallocation, by the number of consumer warpgroups: (consumer, producer). They add up to
# what the launch has: 168 a thread of 384, 128 of 512. With 24 the producer of two consumers spills.
REGISTERS = {2: (232, 40), 3: (160, 32)}
# With a converter, by its warps: four are a warpgroup, two belong to the producer's. Two consumers alone: three beside
# a warpgroup would have 136 each. With 40 the producer spills.
CONVERTER_REGISTERS = {2: (224, 56), 4: (208, 48)}
CONVERTER_CONSUMERS = 2
# Of a consumer, those that hold no output, scores, weights or queries: row state, addresses, the loop. With 192 for
# the others nothing spills at head size 128, and with 188 at head size 256 a few do.
OTHER_REGISTERS = {2: 40, 3: 24}
OTHER_CONVERTER_REGISTERS = 48
# Blocks of 512 threads start with 128 registers each, and no instruction may have more: a WGMMA of 224 columns has.
MAX_COLUMNS_OF_512 = 192
HEAD_DIMS = (64, 96, 128, 160, 192, 224, 256)
# 8-bit floats of a cache. What AMD's chips have is left to the portable family.
NARROW_DTYPES = ("float8_e4m3fn", "float8_e5m2")
NARROW_BYTES = 8  # Of 8-bit elements that become one vector of 16 bits, of 16 bytes.
NOTE_NUMBERS = 16  # Of 32 bits: the note that the producer leaves with a query tile.
# Where TileLang puts a tile. The notes lie in as many bytes before the first.
TILE_ALIGNMENT = 1024
BARRIER_BYTES = 8
# A work item says which piece of how many it is in one number: piece | pieces << PIECE_BITS.
PIECE_BITS = 16


@dataclass(frozen=True, kw_only=True)
class HopperPrefillConfig:
    """Shape of the warp-specialised prefill: one producer warpgroup, and consumers of 64 rows each.

    Attributes:
        block_n: keys of a KV tile.
        warpgroups: consumers.
        heads_per_tile: query heads of one kv head that share a tile: row i of a consumer is token
            ``i // heads_per_tile``, head ``i % heads_per_tile``. Divides the group.
        num_stages: tiles of K, and as many of V, that are in flight.
        q_stages: tiles of Q: with two the next item's is loaded while this one is at work.
        q_in_registers: QK takes the queries from registers, not from shared memory.
        narrow_stages: of an 8-bit cache: tiles of K, and as many of V, that are in flight before a converter makes 16
            bits of them. 0 for a cache of 16 bits.
        converter_warps: of an 8-bit cache: 4, a warpgroup of its own, or 2 that the producer has left. Else 0.
    """

    block_n: int
    warpgroups: int
    heads_per_tile: int
    num_stages: int
    q_stages: int
    q_in_registers: bool = False
    narrow_stages: int = 0
    converter_warps: int = 0

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def threads(self) -> int:
        """Of a block: the consumers, the producer, and the converter if it is a warpgroup."""
        return WARPGROUP * (self.warpgroups + 1 + self.converter_warps * WARP // WARPGROUP)

    @property
    def role_registers(self) -> tuple[int, int]:
        """Of a thread after reallocation: a consumer's, and that of the others."""
        return CONVERTER_REGISTERS[self.converter_warps] if self.converter_warps else REGISTERS[self.warpgroups]

    @property
    def tokens_per_warpgroup(self) -> int:
        return WARPGROUP_ROWS // self.heads_per_tile

    @property
    def tokens_per_tile(self) -> int:
        return self.warpgroups * self.tokens_per_warpgroup

    def head_tiles(self, problem: AttentionProblem) -> int:
        """Tiles that cover the query heads of one kv head."""
        return -(-problem.group_size // self.heads_per_tile)

    def box_rows(self, problem: AttentionProblem) -> int:
        """Keys that one TMA copy fetches: the most that never cross a page, nor a tile."""
        assert problem.page_size is not None
        return gcd(problem.page_size, self.block_n)

    def copies(self, problem: AttentionProblem) -> int:
        """TMA copies of a K or V tile; each is a lane's of one warp. Rows of 8 bits are copied whole."""
        columns = 1 if self.narrow_stages else problem.head_dim // swizzled_columns(problem.head_dim)
        return self.block_n // self.box_rows(problem) * columns

    def shared_memory(self, problem: AttentionProblem, device: DeviceSpec) -> int:
        """Bytes of shared memory: Q, the stages of K and V, the producer's notes, and barriers."""
        del device
        element = ELEMENT_BYTES[problem.dtype]
        rings = [self.q_stages * self.block_m * element, *[self.num_stages * self.block_n * element] * 2]
        rings += [self.narrow_stages * self.block_n] * 2
        tiles = sum(-(-ring * problem.head_dim // TILE_ALIGNMENT) * TILE_ALIGNMENT for ring in rings)
        return TILE_ALIGNMENT + tiles + BARRIER_BYTES * self.barriers

    @property
    def barriers(self) -> int:
        """Full and empty of each stage of Q, K and V, of the 8-bit ones too; and one of values that are in place."""
        return 2 * self.q_stages + 4 * (self.num_stages + self.narrow_stages) + 1

    def registers(self, problem: AttentionProblem) -> int:
        """Of a consumer's thread, for output, scores, and the softmax's weights and queries of 16 bits."""
        elements = problem.head_dim + self.block_n + self.block_n // 2
        if self.q_in_registers:
            elements += problem.head_dim // 2
        return WARPGROUP_ROWS * elements // WARPGROUP

    def illegal_reason(self, problem: AttentionProblem, device: DeviceSpec) -> str | None:
        """Why this config cannot run, or None."""
        return (
            hopper_refusal(problem, device)
            or self._illegal_block(problem)
            or self._illegal_conversion(problem)
            or self._illegal_keys(problem)
            or self._illegal_size(problem, device)
        )

    def _illegal_block(self, problem: AttentionProblem) -> str | None:
        """Of warpgroups, stages and heads, each by itself."""
        if self.warpgroups not in REGISTERS:
            return f"{self.warpgroups} consumer warpgroups; {' or '.join(map(str, REGISTERS))}"
        if min(self.num_stages, self.q_stages) < 1:
            return f"{self.num_stages} stages of K and V, {self.q_stages} of Q; at least 1 of each"
        if not 1 <= self.heads_per_tile <= WARPGROUP_ROWS or problem.group_size % self.heads_per_tile:
            return f"{self.heads_per_tile} heads in a tile of a group of {problem.group_size}; a divisor up to 64"
        return None

    def _illegal_keys(self, problem: AttentionProblem) -> str | None:
        """Of the keys of a tile."""
        if self.block_n < 16 or self.block_n % 16 or self.block_n > MAX_KEYS:
            return f"{self.block_n} keys a tile; a multiple of 16 up to {MAX_KEYS}, which TMA and WGMMA take"
        if self.converter_warps and self.block_n % (keys := converted_keys(problem.head_dim, self.converter_warps)):
            return f"{self.block_n} keys a tile; {self.converter_warps} warps convert {keys} at a time"
        return None

    def _illegal_conversion(self, problem: AttentionProblem) -> str | None:
        """Of what an 8-bit cache needs."""
        if not problem.is_quantized:
            unused = self.narrow_stages or self.converter_warps
            return f"stages of 8 bits or a converter, for a cache of {problem.kv_dtype}" if unused else None
        if self.narrow_stages < 1 or self.converter_warps not in CONVERTER_REGISTERS:
            warps = " or ".join(map(str, CONVERTER_REGISTERS))
            there = f"{self.narrow_stages} stages of {problem.kv_dtype}, {self.converter_warps} warps that convert"
            return f"{there}; at least 1 stage, {warps} warps"
        if self.warpgroups != CONVERTER_CONSUMERS:
            return f"{self.warpgroups} consumer warpgroups beside a converter; {CONVERTER_CONSUMERS}"
        if self.threads > 384 and problem.head_dim > MAX_COLUMNS_OF_512:
            return f"{self.threads} threads with head size {problem.head_dim}; {MAX_COLUMNS_OF_512} at most"
        return None

    def _illegal_size(self, problem: AttentionProblem, device: DeviceSpec) -> str | None:
        """Of what they need together."""
        if self.copies(problem) > WARP:
            return f"{self.copies(problem)} copies a tile of {self.block_n} keys; a warp has {WARP} lanes"
        needed, limit = self.shared_memory(problem, device), device.shared_memory_per_block
        if needed > limit:
            return f"needs {needed} bytes of shared memory; {device.arch} has {limit}"
        others = OTHER_CONVERTER_REGISTERS if self.converter_warps else OTHER_REGISTERS[self.warpgroups]
        registers, most = self.registers(problem), self.role_registers[0] - others
        if registers > most:
            return f"{registers} registers a thread for output, scores and weights; {most} fit without spills"
        return None


def swizzled_columns(head_dim: int) -> int:
    """Elements of 16 bits in a row of one swizzled TMA box: 128 bytes where they divide the head, else 64."""
    return 64 if head_dim % 64 == 0 else 32


def converted_keys(head_dim: int, warps: int) -> int:
    """Keys that a converter takes at a time, eight elements a thread.

    As many vectors lie side by side as are read and written without bank conflicts: 128 bytes of an 8-bit key, where
    they divide the head.
    """
    return WARP * warps * NARROW_BYTES // (128 if head_dim % 128 == 0 else swizzled_columns(head_dim))


def hopper_refusal(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Why Hopper's family does not take a problem, for people; or None."""
    reasons = {
        f"{device.arch} is no Hopper": device.arch != "sm_90",
        "keys and values are contiguous": not problem.is_paged,
        f"the cache holds {problem.kv_dtype}": problem.is_quantized and problem.kv_dtype not in NARROW_DTYPES,
        f"queries are {problem.dtype}": ELEMENT_BYTES[problem.dtype] != ELEMENT_BYTES["bfloat16"],
        f"head size {problem.head_dim}; {', '.join(map(str, HEAD_DIMS))} are taken": problem.head_dim not in HEAD_DIMS,
        "ALiBi": problem.has_alibi,
        "a window that is not causal": not problem.causal and problem.window is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def packed_heads(group_size: int) -> int:
    """The most query heads that share a tile: a divisor of the group that leaves at least 90% of the rows useful."""
    useful = {
        heads: WARPGROUP_ROWS // heads * heads for heads in range(1, WARPGROUP_ROWS + 1) if group_size % heads == 0
    }
    return max(heads for heads, rows in useful.items() if rows >= MIN_PACKING_EFFICIENCY * WARPGROUP_ROWS)


def default_hopper_config(problem: AttentionProblem, device: DeviceSpec) -> HopperPrefillConfig:
    """The first legal config of the head size's list.

    Raises:
        UnsupportedError: the family does not take the problem.
    """
    reasons = []
    shapes = (_NARROW_SHAPES if problem.is_quantized else _SHAPES).get(problem.head_dim, ())
    if problem.window is not None and problem.window <= NARROW_WINDOW:
        shapes = tuple((64, *shape[1:]) for shape in shapes if shape[0] > 64) or shapes
    for block_n, warpgroups, num_stages, q_stages, narrow_stages, converter_warps in shapes:
        config = HopperPrefillConfig(
            block_n=block_n,
            warpgroups=warpgroups,
            heads_per_tile=packed_heads(problem.group_size),
            num_stages=num_stages,
            q_stages=q_stages,
            q_in_registers=_queries_in_registers(problem, block_n),
            narrow_stages=narrow_stages,
            converter_warps=converter_warps,
        )
        reason = config.illegal_reason(problem, device)
        if reason is None:
            return config
        reasons.append(reason)
    raise UnsupportedError("; ".join(dict.fromkeys(reasons)) or hopper_refusal(problem, device) or "no config")


# Up to this window most of a tile of 128 keys would be masked: 64 gain 14% at a window of 128 (H200, 64/8 D64 S8192).
NARROW_WINDOW = 256


def _queries_in_registers(problem: AttentionProblem, block_n: int) -> bool:
    """Where registers are left: gains 1.4% at head size 96, 1.3% in tiles of 64 keys at 64 (H200), loses at 128."""
    return not problem.is_quantized and (problem.head_dim, block_n) in ((96, 128), (64, 64))


# (block_n, warpgroups, num_stages, q_stages, narrow_stages, converter_warps), best first.
_SHAPES = {
    64: ((128, 3, 2, 2, 0, 0), (128, 2, 2, 2, 0, 0)),
    96: ((128, 2, 2, 2, 0, 0), (96, 3, 2, 2, 0, 0)),
    128: ((128, 2, 2, 2, 0, 0),),
    160: ((96, 2, 2, 2, 0, 0), (80, 2, 2, 1, 0, 0)),
    192: ((96, 2, 2, 1, 0, 0), (64, 2, 2, 1, 0, 0)),
    224: ((64, 2, 2, 2, 0, 0),),
    256: ((64, 2, 2, 1, 0, 0),),
}
_NARROW_SHAPES = {
    64: ((128, 2, 2, 2, 2, 4),),
    96: ((128, 2, 2, 2, 2, 4),),
    128: ((128, 2, 2, 2, 1, 4),),
    160: ((96, 2, 2, 1, 2, 4),),
    192: ((80, 2, 2, 1, 1, 4),),
    224: ((64, 2, 2, 1, 2, 2),),
    256: ((64, 2, 2, 1, 1, 2),),
}
