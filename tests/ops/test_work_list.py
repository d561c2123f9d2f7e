"""The work of a prefill: every token once, every KV tile once, in the room that the workspace has for it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tl_backend.configs.choice import default_config
from tl_backend.configs.prefill import default_prefill_config
from tl_backend.configs.prefill_hopper import HEAD_DIMS, HopperPrefillConfig
from tl_backend.device import DeviceSpec
from tl_backend.ops.work_list import (
    COMBINE_TILES,
    EVEN,
    ITEM_TILES,
    MAX_PIECES,
    MIN_TILES,
    SHARES,
    WHOLE,
    Tiling,
    Work,
    finish,
    finishes,
    split,
    tiling,
    work_list,
)
from tl_backend.testing.cases import make_problem

H200 = DeviceSpec.absent("sm_90")
LLAMA = make_problem(32, 8, 128, 16, dtype="bfloat16")
LENS = st.lists(st.tuples(st.integers(0, 300), st.sampled_from([0, 1, 100, 5000, 130_000])), min_size=1, max_size=12)


def hopper(problem=LLAMA, device: DeviceSpec = H200) -> Tiling:
    return tiling(problem, default_config("prefill", problem, device), device, splits=True)


def work(query_lens, seq_lens, problem=LLAMA, tiles: Tiling | None = None) -> Work:
    return work_list(problem, tiles or hopper(problem), np.array(query_lens), 0, np.array(seq_lens))


def kv_tiles(problem, tiles: Tiling, query_len: int, seq_len: int, token: int) -> tuple[int, int]:
    """First and end KV tile of a tile of queries, one key at a time."""
    seen = set()
    for query in range(token, token + tiles.tokens):
        position = seq_len - query_len + query
        last = position if problem.causal else seq_len - 1
        first = 0 if problem.window is None else position - problem.window + 1
        seen |= {key // tiles.keys for key in range(max(0, first), min(seq_len - 1, last) + 1, tiles.keys)}
        if min(seq_len - 1, last) >= max(0, first):
            seen.add(min(seq_len - 1, last) // tiles.keys)
    return (min(seen), max(seen) + 1) if seen else (0, 0)


@given(
    requests=LENS,
    tokens=st.sampled_from([1, 9, 32, 128]),
    keys=st.sampled_from([64, 112, 128]),
    lanes=st.integers(1, 64),
    blocks=st.sampled_from([0, 16, 78, 132]),
    features=st.sampled_from([{}, {"window": 300}, {"causal": False}]),
    bounds=st.booleans(),
    data=st.data(),
)
def test_work_covers_what_there_is_to_do_once_in_the_room_there_is(
    requests, tokens: int, keys: int, lanes: int, blocks: int, features, bounds: bool, data
) -> None:
    problem, tiles = replace(LLAMA, **features), Tiling(tokens, keys, lanes, blocks)
    query_lens = np.array([new for new, _ in requests])
    seq_lens = query_lens + [old for _, old in requests]
    first = data.draw(st.integers(0, len(requests)))
    found = work_list(problem, tiles, query_lens, first, seq_lens if bounds else None)
    assert found.items.dtype == found.split.dtype == np.int32
    assert found.items.shape[1] == found.split.shape[1] == 4
    pieces: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for request, token, code, slot in found.items.tolist():
        pieces.setdefault((request, token), []).append((code & 0xFFFF, code >> 16, slot))
    wanted = {(r, t) for r in range(first, len(requests)) for t in range(0, int(query_lens[r]), tokens)}
    assert pieces.keys() == wanted

    # Each piece of a tile is there once, and has a KV tile at least.
    merged = {(request, token): (count, slot) for request, token, count, slot in found.split.tolist()}
    assert len(merged) == len(found.split)
    for (request, token), parts in pieces.items():
        count, slot = merged.get((request, token), (1, 0))
        assert sorted(parts) == [(piece, count, slot) for piece in range(count)]
        assert count <= MAX_PIECES
        if count > 1:
            begin, end = kv_tiles(problem, tiles, int(query_lens[request]), int(seq_lens[request]), token)
            assert count <= end - begin
    # No two write to one place, and all write into the scratch.
    ends = sorted((slot, slot + count * tokens) for count, slot in merged.values())
    assert all(a[1] <= b[0] for a, b in pairwise(ends))
    assert all(end <= tiles.max_partials for _, end in ends)
    assert len(found.items) + len(found.split) <= tiles.capacity(len(requests), max(1, int(query_lens.sum())))
    if not (bounds and blocks):
        assert merged == {}


@given(requests=LENS, features=st.sampled_from([{}, {"window": 300}, {"causal": False}]))
def test_what_takes_longest_comes_first(requests, features) -> None:
    problem = replace(LLAMA, **features)
    tiles = hopper(problem)
    query_lens = [new for new, _ in requests]
    seq_lens = [new + old for new, old in requests]
    lengths = []
    for request, token, code, _ in work(query_lens, seq_lens, problem).items.tolist():
        begin, end = kv_tiles(problem, tiles, query_lens[request], seq_lens[request], token)
        lengths.append((end - begin) / (code >> 16))
    # In keys, of which a KV tile may hold any number.
    assert all(after <= before + 1 for before, after in pairwise(lengths))


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [((8192,), (8192,)), ((2048,), (32768,)), ((512,) * 4, (8192,) * 4), ((64,) * 32, (1024,) * 32), ((512,), (512,))],
    ids=str,
)
def test_work_that_fills_the_device_is_not_cut(query_lens, seq_lens) -> None:
    found = work(query_lens, seq_lens)
    assert len(found.split) == 0
    assert set(found.items[:, 2]) == {WHOLE}
    assert set(found.items[:, 3]) == {0}


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "pieces"),
    [
        ((64,), (32768,), 8),  # 2 tiles in 8 lanes: 8 pieces are 128 of 132 blocks, and 9 would be a second wave.
        ((128,), (131072,), 4),
        ((32,), (32768,), 16),
    ],
)
def test_few_tiles_of_long_contexts_are_cut_into_one_wave(query_lens, seq_lens, pieces: int) -> None:
    found = work(query_lens, seq_lens)
    assert set(found.split[:, 2]) == {pieces}
    assert len(found.items) * hopper().lanes <= H200.multiprocessors


def test_one_long_request_among_many_short_ones_is_cut_alone() -> None:
    """Not by its neighbours' work: every other tile stays whole."""
    found = work([2] * 64 + [32], [500] * 64 + [100_000])
    assert found.split[:, 0].tolist() == [64]
    pieces = int(found.split[0, 2])
    assert pieces > 4
    assert found.items[:pieces, 0].tolist() == [64] * pieces


costs = st.lists(st.integers(1, 1024), min_size=1, max_size=60)


@given(costs=costs, lanes=st.integers(1, 40), blocks=st.sampled_from([78, 132]))
def test_a_cut_pays_by_the_estimate_that_it_was_chosen_by(costs, lanes: int, blocks: int) -> None:
    tiles, cost = Tiling(32, 128, lanes, blocks), np.array(costs)
    pieces = split(cost, tiles)
    if pieces is None:
        return
    lengths = np.concatenate([[-(-length // n) + ITEM_TILES] * n for length, n in zip(cost, pieces, strict=True)])
    assert finish(lengths, tiles) + COMBINE_TILES < finish(cost + ITEM_TILES, tiles)


@given(costs=costs, lanes=st.integers(1, 40), blocks=st.sampled_from([78, 132]), data=st.data())
def test_estimates_of_many_ways_are_those_of_each(costs, lanes: int, blocks: int, data) -> None:
    tiles, ways = Tiling(32, 128, lanes, blocks), st.lists(st.integers(1, MAX_PIECES), min_size=len(costs))
    counts = [data.draw(ways)[: len(costs)] for _ in range(3)]
    lengths = [[-(-cost // n) for cost, n in zip(costs, way, strict=True)] for way in counts]
    each = [finish(np.repeat(*row), tiles) for row in zip(lengths, counts, strict=True)]
    assert finishes(np.array(lengths), np.array(counts), tiles).tolist() == each


@given(costs=costs, lanes=st.integers(1, 40), blocks=st.sampled_from([78, 132]))
def test_the_best_of_all_shares_is_taken(costs, lanes: int, blocks: int) -> None:
    """One share after the other, in plain Python."""
    tiles, cost = Tiling(32, 128, lanes, blocks), np.array(costs)
    average = (sum(costs) + ITEM_TILES * len(costs)) * lanes / blocks
    best, best_finish = None, slow_finish([length + ITEM_TILES for length in costs], tiles)
    if max(costs) + ITEM_TILES > (EVEN - 1) * average and best_finish > EVEN * average:
        for share in SHARES.tolist():
            ways = max(share * average, MIN_TILES)
            pieces = [min(math.ceil(c / ways), MAX_PIECES) if c > 1.25 * ways else 1 for c in costs]
            if not 0 < sum(n for n in pieces if n > 1) <= tiles.max_pieces:
                continue
            cut = [-(-c // n) + ITEM_TILES for c, n in zip(costs, pieces, strict=True) for _ in range(n)]
            if (found := slow_finish(cut, tiles) + COMBINE_TILES) < best_finish:
                best, best_finish = pieces, found
    pieces = split(cost, tiles)
    assert (None if pieces is None else pieces.tolist()) == best


def slow_finish(lengths: list[int], tiles: Tiling) -> float:
    """Of the items of all lanes, longest first: as many rounds as there are blocks for."""
    items = sorted(lengths * tiles.lanes, reverse=True)
    stacked = [length * number for number, length in enumerate(items[:: tiles.blocks], start=1)]
    return max(sum(lengths) * tiles.lanes / tiles.blocks, *stacked)


@given(costs=costs, lanes=st.integers(1, 40), blocks=st.sampled_from([78, 132]))
def test_the_estimate_is_near_what_longest_first_takes(costs, lanes: int, blocks: int) -> None:
    """Graham: longest-first is never slower than 4/3 of the best, of which the estimate is a bound from below."""
    tiles = Tiling(32, 128, lanes, blocks)
    busy = np.zeros(blocks)
    for length in sorted(costs * lanes, reverse=True):
        busy[busy.argmin()] += length
    estimate = finish(np.array(costs), tiles)
    assert busy.max() * (1 - 1e-9) <= 4 / 3 * estimate <= 4 / 3 * busy.max() * (1 + 1e-9)


def test_the_portable_family_and_a_batch_invariant_workspace_never_cut() -> None:
    config = default_config("prefill", LLAMA, H200)
    portable = tiling(LLAMA, default_prefill_config(LLAMA, H200), H200, splits=True)
    invariant = tiling(LLAMA, config, H200, splits=False)
    assert isinstance(config, HopperPrefillConfig)
    for tiles in (portable, invariant):
        assert (tiles.blocks, tiles.max_partials) == (0, 0)
        assert len(work([1], [100_000], tiles=tiles).split) == 0
    assert len(work([1], [100_000]).split) == 1


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", [(32, 8), (28, 4), (8, 1), (32, 32), (71, 1)])
def test_the_scratch_is_some_megabytes(head_dim: int, heads) -> None:
    """Two waves of blocks, each with the float32 output of its rows."""
    problem = make_problem(*heads, head_dim, 16, dtype="bfloat16")
    tiles = hopper(problem)
    config = default_config("prefill", problem, H200)
    rows = tiles.max_partials * problem.num_q_heads
    assert rows <= 2 * H200.multiprocessors * config.block_m
    assert rows * head_dim * 4 <= 36 << 20
