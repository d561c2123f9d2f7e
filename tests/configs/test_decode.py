"""How many pieces a decode is cut into, and that its scratch holds them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tl_backend.configs.decode import (
    MAX_BLOCKS_PER_MULTIPROCESSOR,
    MAX_SPLITS,
    MIN_KEYS_PER_SPLIT,
    combine_threads,
    even_heads,
    max_partials,
    num_splits,
)
from tl_backend.device import DeviceSpec
from tl_backend.problem import SUPPORTED_HEAD_DIMS
from tl_backend.testing.cases import make_problem

devices = st.sampled_from(["c", "sm_80", "sm_90", "gfx942"]).map(DeviceSpec.absent)
requests = st.integers(0, 2000)
lanes = st.integers(1, 256)
keys = st.integers(0, 200_000)
blocks_per_multiprocessor = st.integers(1, MAX_BLOCKS_PER_MULTIPROCESSOR)


@given(
    num_requests=requests,
    more=requests,
    lanes=lanes,
    max_seqlen_k=keys,
    device=devices,
    blocks=blocks_per_multiprocessor,
)
def test_pieces_fit_the_scratch(
    num_requests: int, more: int, lanes: int, max_seqlen_k: int, device: DeviceSpec, blocks: int
) -> None:
    """CASES.md B1, A24: the scratch is sized once, for the largest batch; every smaller one must fit."""
    splits = num_splits(num_requests, lanes, max_seqlen_k, device, blocks)
    assert 1 <= splits <= MAX_SPLITS
    if splits > 1:
        assert num_requests * splits <= max_partials(num_requests + more, lanes, device, blocks)


@given(num_requests=requests, lanes=lanes, max_seqlen_k=keys, device=devices, blocks=blocks_per_multiprocessor)
def test_a_piece_is_worth_its_combine(
    num_requests: int, lanes: int, max_seqlen_k: int, device: DeviceSpec, blocks: int
) -> None:
    splits = num_splits(num_requests, lanes, max_seqlen_k, device, blocks)
    assert splits == 1 or max_seqlen_k // splits >= MIN_KEYS_PER_SPLIT


@given(
    num_requests=st.integers(1, 2000), lanes=lanes, max_seqlen_k=keys, device=devices, blocks=blocks_per_multiprocessor
)
def test_more_requests_get_no_more_pieces(
    num_requests: int, lanes: int, max_seqlen_k: int, device: DeviceSpec, blocks: int
) -> None:
    assert num_splits(num_requests + 1, lanes, max_seqlen_k, device, blocks) <= num_splits(
        num_requests, lanes, max_seqlen_k, device, blocks
    )


def test_a_batch_of_padding_is_not_divided_by() -> None:
    """CASES.md A11."""
    assert num_splits(0, 8, 0, DeviceSpec.absent("sm_90"), 2) == 1


def test_one_long_request_fills_the_device() -> None:
    assert num_splits(1, 8, 8192, DeviceSpec.absent("sm_90"), 2) > 16
    assert num_splits(1, 8, 100, DeviceSpec.absent("sm_90"), 2) == 1


@given(group=st.integers(1, 500), block_m=st.sampled_from([16, 64]))
def test_a_group_goes_into_as_few_even_tiles_as_hold_it(group: int, block_m: int) -> None:
    heads = even_heads(group, block_m)
    tiles = -(-group // heads)
    assert heads <= block_m
    assert tiles == -(-group // block_m)
    assert heads * tiles - group < tiles, "one tile has more than one row less than another"


def test_a_combine_block_has_a_thread_an_element() -> None:
    for head_dim in SUPPORTED_HEAD_DIMS:
        threads = combine_threads(make_problem(1, 1, head_dim, 16))
        assert threads >= head_dim
        assert threads & (threads - 1) == 0
