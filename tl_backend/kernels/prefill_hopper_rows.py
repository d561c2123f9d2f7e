"""Which token and which head a row of Hopper's query tile is."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_backend.configs.prefill_hopper import WARPGROUP_ROWS, HopperPrefillConfig


@dataclass(frozen=True)
class TileRows:
    """The rows of a tile: 64 a consumer, in which whole tokens lie one after another, each with all heads of the tile.

    Rows that are left over in a consumer's 64 have the token of the next consumer's first.
    """

    config: HopperPrefillConfig

    def token(self, row: Any) -> Any:
        """Counted from the tile's first."""
        config = self.config
        return row // WARPGROUP_ROWS * config.tokens_per_warpgroup + row % WARPGROUP_ROWS // config.heads_per_tile

    def head(self, row: Any) -> Any:
        """Counted from the tile's first."""
        return row % WARPGROUP_ROWS % self.config.heads_per_tile

    def is_query(self, row: Any, num_tokens: Any) -> Any:
        """Whether a row is a query's, in a tile of ``num_tokens``."""
        heads, tokens_each = self.config.heads_per_tile, self.config.tokens_per_warpgroup
        if WARPGROUP_ROWS % heads == 0:
            return self.token(row) < num_tokens
        return T.And(row % WARPGROUP_ROWS // heads < tokens_each, self.token(row) < num_tokens)
