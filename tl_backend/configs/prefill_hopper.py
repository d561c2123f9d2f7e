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
# Of a consumer, those that hold no output, scores or weights: row state, addresses, the loop. Head size 256 with 64
# keys has 176 and does not spill; with 80 it has 188 and does.
OTHER_REGISTERS = {2: 50, 3: 24}
HEAD_DIMS = (64, 96, 128, 160, 192, 224, 256)
# Bytes of the note that the producer leaves with a query tile.
NOTE_BYTES = 64
BARRIER_BYTES = 8
# Where TileLang puts a tile that TMA swizzles.
TILE_ALIGNMENT = 1024


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
    """

    block_n: int
    warpgroups: int
    heads_per_tile: int
    num_stages: int
    q_stages: int

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def threads(self) -> int:
        """Of a block: the consumers and the producer."""
        return WARPGROUP * (self.warpgroups + 1)

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
        """TMA copies of a K or V tile; each is a lane's of one warp."""
        return self.block_n // self.box_rows(problem) * (problem.head_dim // swizzled_columns(problem.head_dim))

    def shared_memory(self, problem: AttentionProblem, device: DeviceSpec) -> int:
        """Bytes of shared memory: Q, the stages of K and V, the producer's notes, and barriers."""
        del device
        tiles = self.q_stages * self.block_m + 2 * self.num_stages * self.block_n
        barriers = BARRIER_BYTES * (2 * self.q_stages + 4 * self.num_stages + 1)
        return tiles * problem.head_dim * ELEMENT_BYTES[problem.dtype] + NOTE_BYTES * self.q_stages + barriers

    def registers(self, problem: AttentionProblem) -> int:
        """Of a consumer's thread, for output, scores and the softmax's weights of 16 bits."""
        elements = problem.head_dim + self.block_n + self.block_n // 2
        return WARPGROUP_ROWS * elements // WARPGROUP

    def illegal_reason(self, problem: AttentionProblem, device: DeviceSpec) -> str | None:
        """Why this config cannot run, or None."""
        return hopper_refusal(problem, device) or self._illegal_shape(problem) or self._illegal_size(problem, device)

    def _illegal_shape(self, problem: AttentionProblem) -> str | None:
        """Of each number by itself."""
        if self.warpgroups not in REGISTERS:
            return f"{self.warpgroups} consumer warpgroups; {' or '.join(map(str, REGISTERS))}"
        if self.block_n < 16 or self.block_n % 16 or self.block_n > MAX_KEYS:
            return f"{self.block_n} keys a tile; a multiple of 16 up to {MAX_KEYS}, which TMA and WGMMA take"
        if min(self.num_stages, self.q_stages) < 1:
            return f"{self.num_stages} stages of K and V, {self.q_stages} of Q; at least 1 of each"
        if not 1 <= self.heads_per_tile <= WARPGROUP_ROWS or problem.group_size % self.heads_per_tile:
            return f"{self.heads_per_tile} heads in a tile of a group of {problem.group_size}; a divisor up to 64"
        return None

    def _illegal_size(self, problem: AttentionProblem, device: DeviceSpec) -> str | None:
        """Of what they need together."""
        if self.copies(problem) > WARP:
            return f"{self.copies(problem)} copies a tile of {self.block_n} keys; a warp has {WARP} lanes"
        needed, limit = self.shared_memory(problem, device), device.shared_memory_per_block
        if needed > limit:
            return f"needs {needed} bytes of shared memory; {device.arch} has {limit}"
        registers, most = self.registers(problem), REGISTERS[self.warpgroups][0] - OTHER_REGISTERS[self.warpgroups]
        if registers > most:
            return f"{registers} registers a thread for output, scores and weights; {most} fit without spills"
        return None


def swizzled_columns(head_dim: int) -> int:
    """Elements of 16 bits in a row of one swizzled TMA box: 128 bytes where they divide the head, else 64."""
    return 64 if head_dim % 64 == 0 else 32


def hopper_refusal(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Why Hopper's family does not take a problem, for people; or None."""
    reasons = {
        f"{device.arch} is no Hopper": device.arch != "sm_90",
        "keys and values are contiguous": not problem.is_paged,
        f"the cache holds {problem.kv_dtype}": problem.is_quantized,
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
    for block_n, warpgroups, num_stages, q_stages in _SHAPES.get(problem.head_dim, ()):
        config = HopperPrefillConfig(
            block_n=block_n,
            warpgroups=warpgroups,
            heads_per_tile=packed_heads(problem.group_size),
            num_stages=num_stages,
            q_stages=q_stages,
        )
        reason = config.illegal_reason(problem, device)
        if reason is None:
            return config
        reasons.append(reason)
    raise UnsupportedError("; ".join(dict.fromkeys(reasons)) or hopper_refusal(problem, device) or "no config")


# (block_n, warpgroups, num_stages, q_stages), best first.
_SHAPES = {
    64: ((128, 3, 2, 2), (128, 2, 2, 2)),
    96: ((96, 3, 2, 2), (128, 2, 2, 2)),
    128: ((128, 2, 2, 2),),
    160: ((96, 2, 2, 2), (80, 2, 2, 1)),
    192: ((96, 2, 2, 1), (64, 2, 2, 1)),
    224: ((64, 2, 2, 2),),
    256: ((64, 2, 2, 1),),
}
