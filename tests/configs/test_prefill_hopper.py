"""Hopper's prefill: what it takes, its default for everything that it takes, and a space of few candidates."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from tl_backend.configs.choice import default_config
from tl_backend.configs.prefill_hopper import (
    HEAD_DIMS,
    NARROW_DTYPES,
    WARPGROUP_ROWS,
    HopperPrefillConfig,
    default_hopper_config,
    hopper_refusal,
    packed_heads,
)
from tl_backend.configs.rules_hopper import HOPPER_RULES, HopperCandidate
from tl_backend.configs.space import space, verdict
from tl_backend.configs.tile import TileConfig
from tl_backend.device import SHARED_MEMORY_PER_BLOCK, DeviceSpec
from tl_backend.problem import SUPPORTED_HEAD_DIMS
from tl_backend.testing.cases import make_problem

H200 = DeviceSpec.absent("sm_90")
LLAMA = make_problem(32, 8, 128, 128, dtype="bfloat16")
LLAMA_8_BITS = replace(LLAMA, kv_dtype="float8_e4m3fn")
RATIOS = (1, 2, 3, 5, 7, 8, 12, 16, 24, 48, 71, 128)
PAGES = (16, 32, 48, 64, 96, 128, 272, 528, 784, 1152, 2112, 4352)


@pytest.mark.parametrize("kv_dtype", [None, *NARROW_DTYPES])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_everything_that_is_taken_has_a_default_of_the_family(head_dim: int, kv_dtype: str | None) -> None:
    for page_size in PAGES:
        for ratio in RATIOS:
            problem = make_problem(ratio, 1, head_dim, page_size, dtype="float16", kv_dtype=kv_dtype, returns_lse=True)
            config = default_config("prefill", problem, H200)
            assert isinstance(config, HopperPrefillConfig)
            assert config.illegal_reason(problem, H200) is None
            assert config.tokens_per_tile >= 1


@pytest.mark.parametrize("ratio", RATIOS)
def test_heads_share_a_tile_as_far_as_its_rows_stay_useful(ratio: int) -> None:
    heads = packed_heads(ratio)
    assert ratio % heads == 0
    assert WARPGROUP_ROWS // heads * heads >= 0.9 * WARPGROUP_ROWS


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (make_problem(32, 8, 80, 16, dtype="bfloat16"), "head size 80; 64, 96, "),
        (make_problem(32, 8, 128, None, dtype="bfloat16"), "contiguous"),
        (make_problem(32, 8, 128, 16, dtype="bfloat16", kv_dtype="float8_e4m3fnuz"), "holds float8_e4m3fnuz"),
        (make_problem(32, 8, 128, 16, dtype="bfloat16", has_alibi=True), "ALiBi"),
        (make_problem(32, 8, 128, 16, dtype="bfloat16", causal=False, window=9), "a window that is not causal"),
        (make_problem(32, 8, 128, 16), "queries are float32"),
    ],
    ids=str,
)
def test_what_is_not_taken_has_the_portable_familys_default(problem, reason: str) -> None:
    assert reason in str(hopper_refusal(problem, H200))
    assert isinstance(default_config("prefill", problem, H200), TileConfig)


@pytest.mark.parametrize("arch", [arch for arch in (*SHARED_MEMORY_PER_BLOCK, "c") if arch != "sm_90"])
def test_no_other_architecture_takes_it(arch: str) -> None:
    device = DeviceSpec.absent(arch)
    problem = replace(LLAMA, dtype=device.dtypes[-1], kv_dtype=device.dtypes[-1], out_dtype=device.dtypes[-1])
    assert hopper_refusal(problem, device) == f"{arch} is no Hopper"
    assert isinstance(default_config("prefill", problem, device), TileConfig)
    assert default_hopper_config(LLAMA, H200).illegal_reason(problem, device) == f"{arch} is no Hopper"


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_a_search_has_few_candidates_and_none_of_the_portable_family(
    head_dim: int, page_size: int, kv_dtype: str
) -> None:
    problem = make_problem(32, 8, head_dim, page_size, dtype="bfloat16", kv_dtype=kv_dtype)
    kept = space("prefill", problem, H200).kept
    assert all(isinstance(config, HopperPrefillConfig) for config in kept)
    # Head sizes 64 and 96 leave registers for the queries, too: that doubles most of their shapes.
    assert 2 <= len(kept) <= 48
    assert 2 <= sum(not config.q_in_registers for config in kept) <= 30
    assert {config.heads_per_tile for config in kept} == {4, 1}


def test_head_sizes_that_are_not_taken_keep_their_space() -> None:
    refused = [size for size in SUPPORTED_HEAD_DIMS if size not in HEAD_DIMS]
    for size in refused:
        kept = space("prefill", make_problem(32, 8, size, 16, dtype="bfloat16"), H200).kept
        assert all(isinstance(config, TileConfig) for config in kept)
    assert 80 in refused


@pytest.mark.parametrize(
    ("rule", "changes", "reason"),
    [
        ("legal", {"warpgroups": 4}, "4 consumer warpgroups; 2 or 3"),
        ("legal", {"block_n": 272}, "272 keys a tile; a multiple of 16 up to 256"),
        ("legal", {"num_stages": 0}, "0 stages of K and V, 2 of Q; at least 1"),
        ("legal", {"block_n": 176, "q_stages": 1}, "196 registers a thread"),  # (128 + 176 + 88) / 2
        ("legal", {"num_stages": 3}, "needs 263304 bytes of shared memory"),  # 1024 + (256 + 768) * 256 + 17 * 8
        ("query tiles", {"q_stages": 1}, "1 tile of Q, where 2 fit"),
        ("packing", {"heads_per_tile": 1, "block_n": 64}, "1 heads a tile of a group of 4, in another shape"),
    ],
)
def test_each_rule_prunes_what_it_is_for(rule: str, changes, reason: str) -> None:
    default = default_hopper_config(LLAMA, H200)
    assert HOPPER_RULES[rule](HopperCandidate(default, LLAMA, H200)) is None
    assert reason in str(HOPPER_RULES[rule](HopperCandidate(replace(default, **changes), LLAMA, H200)))


@pytest.mark.parametrize(
    ("problem", "changes", "reason"),
    [
        (LLAMA, {"narrow_stages": 1}, "stages of 8 bits or a converter, for a cache of bfloat16"),
        (LLAMA, {"converter_warps": 4, "q_stages": 1}, "or a converter, for a cache of bfloat16"),
        (LLAMA_8_BITS, {"narrow_stages": 0}, "0 stages of float8_e4m3fn, 4 warps that convert; at least 1 stage"),
        (LLAMA_8_BITS, {"converter_warps": 3}, "3 warps that convert; at least 1 stage, 2 or 4 warps"),
        (LLAMA_8_BITS, {"warpgroups": 3}, "3 consumer warpgroups beside a converter; 2"),
        # (384 + 64) KiB a byte of the head, in 16 bits, and 64 in 8; 2 * 64 + 20 * 8
        (LLAMA_8_BITS, {"narrow_stages": 2}, "needs 263336 bytes of shared memory"),
        (replace(LLAMA_8_BITS, head_dim=96, head_dim_v=96), {"block_n": 80}, "80 keys a tile; 4 warps convert 32"),
        (replace(LLAMA_8_BITS, head_dim=256, head_dim_v=256), {"block_n": 16}, "512 threads with head size 256; 192"),
    ],
)
def test_only_an_8_bit_cache_has_a_converter(problem, changes, reason: str) -> None:
    config = replace(
        default_hopper_config(problem if problem in (LLAMA, LLAMA_8_BITS) else LLAMA_8_BITS, H200), **changes
    )
    assert reason in str(config.illegal_reason(problem, H200))


@pytest.mark.parametrize("page_size", [16, 48, 128])
def test_rows_of_8_bits_are_copied_whole(page_size: int) -> None:
    narrow, wide = (replace(problem, page_size=page_size) for problem in (LLAMA_8_BITS, LLAMA))
    boxes = default_hopper_config(narrow, H200).copies(narrow)
    assert default_hopper_config(wide, H200).copies(wide) == 2 * boxes


def test_a_row_for_a_class_of_pages_is_legal_for_each_of_them() -> None:
    """784 tokens are seven boxes of 112 keys, but pages of 16, of the same class, are 35 copies a tile."""
    large, small = (make_problem(32, 8, 160, page, dtype="bfloat16") for page in (784, 16))
    config = replace(default_hopper_config(large, H200), block_n=112)
    assert config.copies(large) <= 32 < config.copies(small)
    found = [verdict("prefill", config, problem, H200) for problem in (large, small)]
    assert found == [("legal", "35 copies a tile of 112 keys; a warp has 32 lanes")] * 2


def test_what_is_near_the_default_comes_first() -> None:
    kept = space("prefill", LLAMA, H200).kept
    differing = [sum(a != b for a, b in zip(astuple(config), astuple(kept[0]), strict=True)) for config in kept]
    assert differing == sorted(differing)
    assert differing[:2] == [0, 1]
