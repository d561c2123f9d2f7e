"""The work of a prefill: tiles of query tokens, cut into pieces of their keys where there are too few to fill a device.

A work list is int32 ``[W, 4]`` of (request, first token, piece | pieces << 16, slot), longest first. Piece p of n of a
tile with E KV tiles walks those from E * p // n to E * (p + 1) // n, E counted on the device: here lengths may be
bounds. It writes partial results to rows slot + token * pieces + piece, which a combine merges by the split list, int32
``[C, 4]`` of (request, first token, pieces, slot). A tile in one piece writes the output.

Legend: R requests, W items, N tiles, P ways to cut them.
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
COUNT_BITS = MAX_PIECES.bit_length()
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
    requests = np.arange(first_request, len(query_lens)).repeat(counts)
    tokens = (np.arange(len(requests)) - (counts.cumsum() - counts).repeat(counts)) * tiles.tokens
    keys = _keys(problem, tiles, query_lens, requests, tokens, seq_lens)
    pieces = None
    if tiles.blocks and seq_lens is not None and len(keys):
        pieces = split(np.maximum(1, -(-keys // tiles.keys)), tiles)
    table = np.empty((len(requests), COLUMNS), dtype=np.int32)
    table[:, 0], table[:, 1] = requests, tokens
    if pieces is None:
        table[:, 2], table[:, 3] = WHOLE, 0
        return Work(items=table[(-keys).argsort(kind="stable")], split=_NOTHING)
    is_cut = pieces > 1
    rows = pieces * tiles.tokens * is_cut
    table[:, 2], table[:, 3] = pieces, (rows.cumsum() - rows) * is_cut
    order = (-(keys / pieces)).argsort(kind="stable")
    counts = pieces[order]
    items = table[order.repeat(counts)]
    piece = np.arange(len(items)) - (counts.cumsum() - counts).repeat(counts)
    items[:, 2] = piece | items[:, 2] << PIECE_BITS
    return Work(items=items, split=table[is_cut])


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
    whole = finish(cost + ITEM_TILES, tiles)
    if whole <= EVEN * average:
        return None
    shares = np.maximum(SHARES * average, MIN_TILES)[:, None]
    pieces = np.where(cost > 1.25 * shares, np.minimum(np.ceil(cost / shares), MAX_PIECES), 1).astype(np.int64)
    cut = (pieces * (pieces > 1)).sum(axis=1)
    pieces = pieces[(cut > 0) & (cut <= tiles.max_pieces)]
    if len(pieces) == 0:
        return None
    found = finishes(-(-cost // pieces) + ITEM_TILES, pieces, tiles) + COMBINE_TILES
    best = int(found.argmin())
    chosen: np.ndarray = pieces[best]
    return chosen if found[best] < whole else None


def finish(lengths: np.ndarray, tiles: Tiling) -> float:
    """An estimate of when the last block is ready, which take the longest item that is left, in KV tiles.

    Of the k * blocks + 1 longest some block has k + 1, each as long as the last of them; and none is ready before the
    average. Both are lower bounds, which longest-first comes close to.

    Args:
        lengths: of each lane's items.
    """
    lasts = -np.sort(-lengths)[_ranks(len(lengths), tiles)]
    stacked = lasts * np.arange(1, len(lasts) + 1)
    return max(float(lengths.sum()) * tiles.lanes / tiles.blocks, float(stacked.max()))


def finishes(lengths: np.ndarray, counts: np.ndarray, tiles: Tiling) -> np.ndarray:
    """``finish`` of each of several ways to cut the same tiles, ``[P]``.

    Args:
        lengths: ``[P, N]``.
        counts: how many items of each length a lane has, at most ``MAX_PIECES``, ``[P, N]``.
    """
    # Lengths and counts are sorted as one number: a sort of one and a look-up of the other would take twice as long.
    longest_first = -np.sort(-(lengths << COUNT_BITS | counts), axis=1)
    ends = (longest_first & (1 << COUNT_BITS) - 1).cumsum(axis=1)
    totals = ends[:, -1:]
    most = int(totals.max())
    ranks = _ranks(most, tiles)
    # Rows follow one another, so that one search finds the item of each rank in each of them.
    row_starts = np.arange(len(ends))[:, None] * (most + 1)
    places = (
        (ends + row_starts).ravel().searchsorted((ranks + row_starts).ravel(), side="right").reshape(-1, len(ranks))
    )
    lasts = longest_first.ravel().take(places, mode="clip") >> COUNT_BITS
    stacked = lasts * np.arange(1, len(ranks) + 1) * (ranks < totals)
    average: np.ndarray = (lengths * counts).sum(axis=1) * tiles.lanes / tiles.blocks
    latest: np.ndarray = np.maximum(average, stacked.max(axis=1))
    return latest


def _ranks(num_items: int, tiles: Tiling) -> np.ndarray:
    """Which of a lane's items, by length, is the k * blocks + 1 longest of all lanes', for each k."""
    ranks: np.ndarray = np.arange(0, num_items * tiles.lanes, tiles.blocks) // tiles.lanes
    return ranks
