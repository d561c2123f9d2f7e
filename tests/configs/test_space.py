"""Config spaces: what is kept can run, what is pruned says why, and the default stands first."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_backend.configs.choice import KINDS, default_config
from tl_backend.configs.decode import DecodeChoice
from tl_backend.configs.dimensions import candidates, dimensions
from tl_backend.configs.explain import explain
from tl_backend.configs.key import MAX_TILE_KEYS, ProblemKey
from tl_backend.configs.rules import PREFILL_RULES, RULES, Candidate
from tl_backend.configs.rules_hopper import HOPPER_RULES
from tl_backend.configs.space import space, tile_of
from tl_backend.configs.tile import TileConfig
from tl_backend.device import SHARED_MEMORY_PER_BLOCK, DeviceSpec
from tl_backend.problem import SUPPORTED_HEAD_DIMS, AttentionProblem
from tl_backend.testing.cases import make_problem

H200 = DeviceSpec.absent("sm_90")
LLAMA = {page: make_problem(32, 8, 128, page, dtype="bfloat16") for page in (16, 128)}
devices = st.sampled_from([*SHARED_MEMORY_PER_BLOCK, "c"]).map(DeviceSpec.absent)
kinds = st.sampled_from(KINDS)


@st.composite
def problems(draw: st.DrawFn, device: DeviceSpec) -> AttentionProblem:
    kv_heads = draw(st.sampled_from([1, 2, 8, 32]))
    return make_problem(
        kv_heads * draw(st.sampled_from([1, 3, 4, 7, 8, 16, 71])),
        kv_heads,
        draw(st.sampled_from(SUPPORTED_HEAD_DIMS)),
        draw(st.sampled_from([16, 32, 48, 64, 128, 256, 784])),
        dtype=device.dtypes[-1],
        window=draw(st.sampled_from([None, 100, 300, 5000])),
        returns_lse=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), device=devices, kind=kinds)
def test_every_candidate_is_kept_or_pruned_for_a_reason(data: st.DataObject, device: DeviceSpec, kind: str) -> None:
    problem = data.draw(problems(device))
    found = space(kind, problem, device)
    default = default_config(kind, problem, device)
    assert found.kept[0] == default
    pruned = [each.config for each in found.pruned]
    assert len(set(found.kept)) == len(found.kept), "a config is kept twice"
    assert {*found.kept, *pruned} == {default, *candidates(kind, problem, device)}
    assert not set(found.kept) & set(pruned)
    for config in found.kept:
        assert config.illegal_reason(problem, device) is None
        if isinstance(tile := tile_of(config), TileConfig):
            assert MAX_TILE_KEYS % tile.block_n == 0, "keys of pages of one class would be tiled differently"
    for each in found.pruned:
        assert "\n" not in each.reason
        assert any(letter.isdigit() for letter in each.reason), f"no number in: {each.reason}"
        assert len(each.reason) < 120


@settings(max_examples=60, deadline=None)
@given(data=st.data(), device=devices, kind=kinds)
def test_problems_of_one_key_have_one_space(data: st.DataObject, device: DeviceSpec, kind: str) -> None:
    problem = data.draw(problems(device))
    assert space(kind, ProblemKey.of(problem).representative(), device) == space(kind, problem, device)


@pytest.mark.parametrize("page", [16, 128])
def test_llama_on_an_h200_has_enough_to_choose_from(page: int) -> None:
    """The issue's search is of 108 configs of one problem."""
    kept = [config for kind in KINDS for config in space(kind, LLAMA[page], H200).kept]
    assert len(kept) >= 108
    tiles = [tile_of(config) for config in kept]
    assert {tile.block_m for tile in tiles} >= {16, 32, 64, 128}
    assert {tile.heads_per_tile for tile in tiles} >= {1, 4}
    blocks = {config.blocks_per_multiprocessor for config in kept if isinstance(config, DecodeChoice)}
    assert blocks == {1, 2, 3, 4}


def test_amd_has_the_dimensions_of_the_article() -> None:
    named = dimensions("prefill", LLAMA[16], DeviceSpec.absent("gfx942"))
    wanted = {"block_m", "block_n", "threads", "num_split_q", "num_stages", "k_pack", "rasterisation"}
    assert {*wanted, "coalesced_width"} <= set(named)
    kept = space("prefill", LLAMA[16], DeviceSpec.absent("gfx950")).kept
    for name in named:
        assert len({getattr(tile_of(config), name) for config in kept}) > 1, f"{name} is the same in all that is kept"


TILE = TileConfig(block_m=64, block_n=64, heads_per_tile=4, num_stages=1, threads=128)


@pytest.mark.parametrize(
    ("rule", "changes", "page", "arch", "reason"),
    [
        ("waves", {"threads": 96}, 16, "gfx942", "96 threads are no multiple of a wave of 64"),
        ("tile keys", {"block_n": 48}, 16, "sm_90", "48 keys a tile do not divide 128"),
        ("rows of warps", {"threads": 256}, 16, "sm_90", "256 threads on 64 rows; 128 take 64"),
        ("rows of warps", {"threads": 256}, 16, "sm_80", "64 rows for 8 waves; each takes a multiple of 16"),
        ("rows of warps", {"threads": 256, "splits_columns": True, "block_n": 32}, 16, "sm_90", "32 columns for 64"),
        # (128 + 64) * 128 / 64 = 384, and 255 registers less 32.
        ("registers", {"block_m": 128, "threads": 64}, 16, "sm_80", "384 accumulators a thread; about 223 fit"),
        # 65536 / 512 - 32.
        ("registers", {"block_m": 256, "threads": 512, "block_n": 128}, 16, "sm_90", "128 accumulators"),
        ("stages", {"num_stages": 2}, 16, "sm_90", "2 stages of tiles that no TMA copies; 1 compiles"),
        ("stages", {"num_stages": 2}, 128, "sm_80", "2 stages of tiles that no TMA copies"),
        ("stages", {}, 128, "gfx942", "1 stages on gfx942, which has no asynchronous copy"),
        ("whole vectors", {"block_m": 192, "threads": 384}, 16, "sm_90", "8192 elements for 384 threads"),
    ],
)
def test_each_rule_prunes_what_it_is_for(rule: str, changes, page: int, arch: str, reason: str) -> None:
    problem = make_problem(32, 8, 128, page, dtype="bfloat16")
    found = PREFILL_RULES[rule](Candidate(replace(TILE, **changes), problem, DeviceSpec.absent(arch)))
    assert reason in str(found)


def test_tiles_that_are_mostly_idle_are_pruned() -> None:
    """13 heads in tiles of 12 leave 11 of every second tile idle, and 4 of 16 rows in each."""
    candidate = Candidate(replace(TILE, block_m=16, heads_per_tile=12), make_problem(13, 1, 128, 16), H200)
    assert "41% of the rows are useful; the limit is 50%" in str(PREFILL_RULES["packing"](candidate))


def test_tails_of_odd_head_sizes_are_not_gathered_by_384_threads() -> None:
    tile = replace(TILE, block_m=192, block_n=128, threads=384)
    whole = {size: make_problem(4, 1, size, 128, dtype="bfloat16") for size in (80, 128)}
    assert RULES["whole vectors"](Candidate(tile, whole[128], H200)) is None
    assert "this is 80" in str(RULES["whole vectors"](Candidate(tile, whole[80], H200)))


def test_an_explanation_counts_and_shows_what_is_there() -> None:
    text = explain(LLAMA[16], H200)
    for kind in KINDS:
        found = space(kind, LLAMA[16], H200)
        total = len(found.kept) + len(found.pruned)
        assert f"{kind}: {total} candidates, {len(found.kept)} kept, {len(found.pruned)} pruned" in text
        assert {each.rule for each in found.pruned} <= {*PREFILL_RULES, *HOPPER_RULES}
    assert text.count("(default)") == 2
    assert "by stages, such as" in text


def test_an_explanation_of_contiguous_keys_has_no_decode() -> None:
    text = explain(replace(LLAMA[16], page_size=None), H200)
    assert "prefill:" in text
    assert "decode:" not in text


def test_what_is_near_the_default_comes_first() -> None:
    kept = space("prefill", make_problem(32, 8, 128, 128), DeviceSpec.absent("sm_90")).kept
    differing = [sum(a != b for a, b in zip(astuple(config), astuple(kept[0]), strict=True)) for config in kept]
    assert differing[0] == 0
    assert differing == sorted(differing)
    assert differing[1] == 1
