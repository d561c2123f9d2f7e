"""Which block of a prefill takes which work: index arithmetic in the grid, in an order that its config chooses.

Every lane (a kv head and a part of its query heads) goes over the whole work list.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_backend.configs.tile import TileConfig


@dataclass(frozen=True, kw_only=True)
class WorkOrder:
    """Attributes: lanes: of the problem; config: its ``rasterisation`` and ``num_split_q`` count here."""

    lanes: int
    config: TileConfig

    def num_blocks(self, num_work: Any) -> Any:
        """Of the grid."""
        return self._walkers(num_work) * self.lanes

    def turns(self, block: Any, num_work: Any) -> Any:
        """A context whose value counts the items that a block takes: a loop, but where every block takes one."""
        if not self.config.num_split_q:
            # A loop of one turn would cost: Hopper's registers are not reallocated to the consumers inside a loop.
            return contextlib.nullcontext(0)
        walkers = self._walkers(num_work)
        rounds = num_work // walkers
        in_last = self._position(block, rounds, walkers) < num_work % walkers
        return T.serial(rounds + T.cast(in_last, "int32"))

    def item(self, block: Any, turn: Any, num_work: Any) -> Any:
        """Of the work list, which has the longest first."""
        if self.config.num_split_q:
            walkers = self._walkers(num_work)
            return turn * walkers + self._position(block, turn, walkers)
        if self.config.rasterisation:
            return block % (self.config.rasterisation * num_work) // self._panel_lanes(block, num_work)
        return block // self.lanes

    def lane(self, block: Any, num_work: Any) -> Any:
        """Of a block."""
        if self.config.rasterisation:
            panel = self.config.rasterisation * num_work
            first = block // panel * self.config.rasterisation
            return first + block % panel % self._panel_lanes(block, num_work)
        # kv heads vary fastest: blocks that run side by side share the request's block-table rows and query lines.
        return block % self.lanes

    def _walkers(self, num_work: Any) -> Any:
        """Blocks of a lane."""
        return T.min(num_work, self.config.num_split_q) if self.config.num_split_q else num_work

    def _position(self, block: Any, turn: Any, walkers: Any) -> Any:
        """A block's place in a turn, counted from the other end every second time: none has the longest of all."""
        place = block // self.lanes
        return T.if_then_else(turn % 2 == 0, place, walkers - 1 - place)

    def _panel_lanes(self, block: Any, num_work: Any) -> Any:
        """Lanes of a block's panel: the last panel may have fewer."""
        size = self.config.rasterisation
        if self.lanes % size == 0:
            return size
        return T.min(size, self.lanes - block // (size * num_work) * size)
