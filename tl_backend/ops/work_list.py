"""The work of a prefill: tiles of query tokens, cut into pieces of their keys where there are too few to fill a device.

A work list is int32 ``[W, 4]`` of (request, first token, piece | pieces << 16, slot), longest first. Piece p of n of a
tile with E KV tiles walks those from E * p // n to E * (p + 1) // n, E counted on the device: here lengths may be
bounds. It writes partial results to rows slot + token * pieces + piece, which a combine merges by the split list, int32
``[C, 4]`` of (request, first token, pieces, slot). A tile in one piece writes the output.

Legend: R requests, W items, N tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tl_backend.configs.choice import PrefillConfig
from tl_backend.configs.prefill_hopper import PIECE_BITS, HopperPrefillConfig
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem

COLUMNS = 4
WHOLE = 1 << PIECE_BITS  # The first of one piece.
MAX_PIECES = 64
# Pieces of all split tiles and lanes together, in blocks of the whole device: what the scratch is made for.
MAX_WAVES = 2
# The busiest block may have this much more than the average before tiles are cut at all.
EVEN = 1.1
# In KV tiles. Of an item: its queries are loaded, its output is written. Of the second launch: a KV tile of 128 x 128
# takes 2 us.
ITEM_TILES, COMBINE_TILES = 1, 3
# A piece of fewer KV tiles is mostly overhead.
MIN_TILES = 2
# Lengths of a piece that are tried, in parts of an even share. Shares that come out a little too small would make one
# block too many, and a wave of its own: hence those above 1.
SHARES = np.array([1.5, 1.25, 1.12, 1.04, 1.0, 0.8, 2 / 3, 0.5])


class Tiling(NamedTuple):
    """What a config makes of a prefill's work.

    Attributes:
        tokens: of a tile.
        keys: of a KV tile.
        lanes: blocks of one item: kv heads times head tiles.
        blocks: that run at once on the device; 0 where tiles are never cut.
    """

    tokens: int
    keys: int
    lanes: int
    blocks: int

    @property
    def max_pieces(self) -> int:
        """Of all split tiles of a step."""
        return MAX_WAVES * self.blocks // self.lanes

    @property
    def max_partials(self) -> int:
        """Rows of partial results."""
        return self.max_pieces * self.tokens

    def capacity(self, max_num_reqs: int, max_num_tokens: int) -> int:
        """Rows that the work list and the split list can have together: two pieces or more make a row of the latter."""
        tiles = max_num_tokens // self.tokens + max_num_reqs
        return tiles + self.max_pieces + self.max_pieces // 2


def tiling(problem: AttentionProblem, config: PrefillConfig, device: DeviceSpec, *, splits: bool) -> Tiling:
    """Of a config.

    Args:
        splits: whether tiles may be cut. Those of the portable family never are.
    """
    cuts = splits and isinstance(config, HopperPrefillConfig)
    return Tiling(
        tokens=config.tokens_per_tile,
        keys=config.block_n,
        lanes=problem.num_kv_heads * config.head_tiles(problem),
        blocks=device.multiprocessors if cuts else 0,
    )


@dataclass(frozen=True, kw_only=True)
class Work:
    """Attributes: items: the work list; split: the split list."""

    items: np.ndarray
    split: np.ndarray


def work_list(
    problem: AttentionProblem,
    tiles: Tiling,
    query_lens: np.ndarray,
    first_request: int,
    seq_lens: np.ndarray | None = None,
) -> Work:
    """The work of the requests from ``first_request`` on, what takes longest first: that keeps the last wave short.

    Args:
        query_lens: new tokens of each request, ``[R]``.
        seq_lens: keys of each request, or upper bounds, ``[R]``. Without them nothing is cut.
    """
    counts = -(-query_lens[first_request:] // tiles.tokens)
    requests = np.repeat(np.arange(first_request, len(query_lens)), counts)
    starts = np.cumsum(counts) - counts
    tokens = (np.arange(len(requests)) - np.repeat(starts, counts)) * tiles.tokens
    keys = _keys(problem, tiles, query_lens, requests, tokens, seq_lens)
    pieces = None
    if tiles.blocks and seq_lens is not None and len(keys):
        pieces = split(np.maximum(1, -(-keys // tiles.keys)), tiles)
    if pieces is None:
        order = np.argsort(-keys, kind="stable")
        items = np.empty((len(order), COLUMNS), dtype=np.int32)
        items[:, 0], items[:, 1], items[:, 2], items[:, 3] = requests[order], tokens[order], WHOLE, 0
        return Work(items=items, split=_NOTHING)
    rows = np.where(pieces > 1, pieces * tiles.tokens, 0)
    slots = np.where(pieces > 1, np.cumsum(rows) - rows, 0)
    order = np.argsort(-(keys / pieces), kind="stable")
    counts = pieces[order]
    tile = np.repeat(order, counts)
    piece = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
    items = np.stack([requests[tile], tokens[tile], piece | pieces[tile] << PIECE_BITS, slots[tile]], axis=1)
    cut = np.flatnonzero(pieces > 1)
    merged = np.stack([requests[cut], tokens[cut], pieces[cut], slots[cut]], axis=1)
    return Work(items=items.astype(np.int32), split=merged.astype(np.int32))


_NOTHING = np.empty((0, COLUMNS), dtype=np.int32)


def _keys(
    problem: AttentionProblem,
    tiles: Tiling,
    query_lens: np.ndarray,
    requests: np.ndarray,
    tokens: np.ndarray,
    seq_lens: np.ndarray | None,
) -> np.ndarray:
    """Keys that each tile walks, ``[N]``; those of its queries alone where no lengths are given."""
    lens = query_lens if seq_lens is None else seq_lens
    position = (lens - query_lens)[requests] + tokens
    ends: np.ndarray = lens[requests]
    if problem.causal:
        ends = np.minimum(ends, position + tiles.tokens)
    if problem.window is None:
        return ends
    first = np.maximum(0, position - problem.window + 1) // tiles.keys
    walked: np.ndarray = ends - first * tiles.keys
    return walked


def split(cost: np.ndarray, tiles: Tiling) -> np.ndarray | None:
    """Pieces of each tile, ``[N]``; None where each is best in one.

    So it is where the tiles keep the device evenly busy as they are. Else shares of several lengths are tried: a tile
    of more than 1.25 shares is cut into as many pieces as it has shares. What finishes first is taken, by an estimate.

    Args:
        cost: KV tiles of each.
    """
    average = float(cost.sum() + ITEM_TILES * len(cost)) * tiles.lanes / tiles.blocks
    # Longest first, no block is busy for more than the average and the longest item.
    if int(cost.max()) + ITEM_TILES <= (EVEN - 1) * average:
        return None
    best, best_finish = None, finish(cost + ITEM_TILES, tiles)
    if best_finish <= EVEN * average:
        return None
    for share in np.maximum(SHARES * average, MIN_TILES):
        pieces = np.where(cost > 1.25 * share, np.minimum(np.ceil(cost / share), MAX_PIECES), 1).astype(np.int64)
        if not 0 < int(pieces[pieces > 1].sum()) <= tiles.max_pieces:
            continue
        found = finish(np.repeat(-(-cost // pieces) + ITEM_TILES, pieces), tiles) + COMBINE_TILES
        if found < best_finish:
            best, best_finish = pieces, found
    return best


def finish(lengths: np.ndarray, tiles: Tiling) -> float:
    """An estimate of when the last block is ready, which take the longest item that is left, in KV tiles.

    Of the k * blocks + 1 longest some block has k + 1, each as long as the last of them; and none is ready before the
    average. Both are lower bounds, which longest-first comes close to.

    Args:
        lengths: of each lane's items.
    """
    longest_first = -np.sort(-lengths)
    places = np.arange(0, len(lengths) * tiles.lanes, tiles.blocks)
    stacked = longest_first[places // tiles.lanes] * np.arange(1, len(places) + 1)
    return max(float(lengths.sum()) * tiles.lanes / tiles.blocks, float(stacked.max()))
