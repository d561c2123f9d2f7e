"""Tiles: packing of query heads, shared memory, legality."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tl_backend.configs.decode import DecodeChoice
from tl_backend.configs.tile import MIN_PACKING_EFFICIENCY, TileConfig, first_legal, heads_per_tile
from tl_backend.device import DeviceSpec
from tl_backend.errors import UnsupportedError
from tl_backend.testing.cases import make_problem

H200 = DeviceSpec.absent("sm_90")
PROBLEM = make_problem(32, 8, 128, 16, dtype="bfloat16")
TILE = TileConfig(block_m=128, block_n=64, heads_per_tile=4, num_stages=1, threads=128)


@given(group=st.integers(1, 256), block_m=st.sampled_from([16, 32, 64, 128, 192]))
def test_packing_loses_little(group: int, block_m: int) -> None:
    heads = heads_per_tile(group, block_m)
    assert 1 <= heads <= min(group, block_m)
    useful_rows = block_m // heads * heads / block_m
    useful_heads = group / (-(-group // heads) * heads)
    assert heads == 1 or useful_rows * useful_heads >= MIN_PACKING_EFFICIENCY


@pytest.mark.parametrize(("group", "wanted"), [(1, 1), (4, 4), (7, 7), (71, 25), (64, 64), (128, 128)])
def test_packing_of_known_ratios(group: int, wanted: int) -> None:
    assert heads_per_tile(group, 128) == wanted


@given(group=st.integers(1, 100), heads=st.integers(1, 100))
def test_head_tiles_cover_the_group(group: int, heads: int) -> None:
    tile = replace(TILE, heads_per_tile=heads)
    tiles = tile.head_tiles(make_problem(group, 1, 64, 16))
    assert (tiles - 1) * heads < group <= tiles * heads


def test_shared_memory() -> None:
    """tests/kernels/test_targets.py holds these against what generated code allocates."""
    tiles = (128 + 2 * 64) * 128 * 2
    assert TILE.shared_memory(PROBLEM, H200) == tiles
    whole = replace(PROBLEM, page_size=64)
    assert TILE.shared_memory(whole, H200) == tiles + 32, "barriers of the TMA copies"
    assert replace(TILE, num_stages=2).shared_memory(whole, H200) == tiles + 2 * 64 * 128 * 2 + 64
    assert TILE.shared_memory(PROBLEM, DeviceSpec.absent("gfx942")) == tiles + 8 * 128


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_m": 24}, "tile 24 x 64 is not a multiple of 16 x 16"),
        ({"block_n": 8}, "tile 128 x 8 is not a multiple"),
        ({"block_n": 0}, "tile 128 x 0 is not a multiple"),
        ({"threads": 0}, "0 threads; at least 1"),
        ({"heads_per_tile": 0}, "0 heads in a tile of 128 rows and a group of 4"),
        ({"heads_per_tile": 5}, "5 heads in a tile of 128 rows and a group of 4"),
        ({"num_stages": 9}, "bytes of shared memory; sm_90 has 232448"),
        ({"k_pack": 2}, "k_pack 2 on sm_90; AMD packs 1 or 2"),
        ({"coalesced_width": 8}, "coalesced_width 8 on sm_90; 2, 4"),
        ({"rasterisation": 8}, "panels of 8 lanes; there are 8"),
        ({"rasterisation": 2, "num_split_q": 2}, "rasterisation 2 orders blocks that num_split_q 2 has walk"),
        ({"num_split_q": -1}, "num_split_q -1; neither is negative"),
    ],
)
def test_illegal_tiles_say_why(changes, reason: str) -> None:
    assert reason in str(replace(TILE, **changes).illegal_reason(PROBLEM, H200))


def test_options_that_would_do_nothing_are_illegal() -> None:
    whole = replace(PROBLEM, page_size=64)
    narrow = replace(TILE, coalesced_width=4)
    assert narrow.illegal_reason(PROBLEM, H200) is None
    assert "tiles that TMA copies" in str(narrow.illegal_reason(whole, H200))
    assert "coalesced_width 4 on c" in str(narrow.illegal_reason(PROBLEM, DeviceSpec.absent("c")))
    odd = replace(PROBLEM, head_dim=48, head_dim_v=48)
    packed = replace(TILE, block_m=64, k_pack=2)
    assert packed.illegal_reason(PROBLEM, DeviceSpec.absent("gfx942")) is None
    assert "k_pack 2 on head size 48" in str(packed.illegal_reason(odd, DeviceSpec.absent("gfx942")))


@pytest.mark.parametrize("option", ["rasterisation", "num_split_q"])
def test_a_decode_refuses_the_order_of_a_work_list(option: str) -> None:
    choice = DecodeChoice(tile=replace(TILE, **{option: 2}), blocks_per_multiprocessor=2)
    assert f"{option} 2" in str(choice.illegal_reason(PROBLEM, H200))


def test_a_legal_tile() -> None:
    assert TILE.illegal_reason(PROBLEM, H200) is None


def test_the_first_legal_candidate_is_taken() -> None:
    huge, small = replace(TILE, num_stages=9), replace(TILE, block_n=32)
    assert first_legal([huge, TILE, small], PROBLEM, H200) is TILE


def test_no_legal_candidate_names_each_reason() -> None:
    with pytest.raises(UnsupportedError) as caught:
        first_legal([replace(TILE, num_stages=9), replace(TILE, heads_per_tile=5)], PROBLEM, H200)
    assert "232448 bytes of shared memory" in str(caught.value)
    assert "5 heads in a tile" in str(caught.value)
