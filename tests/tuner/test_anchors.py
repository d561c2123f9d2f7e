"""One problem of a class is searched whole; the others try its best configs, fitted to their heads."""

from __future__ import annotations

from tl_backend.configs.models import problems, shipped_now
from tl_backend.configs.space import space, tile_of
from tl_backend.device import DeviceSpec
from tl_backend.testing.cases import make_problem
from tl_backend.tuner.anchors import anchor_class, distinct, kinds_of, shape, shares, transferred
from tl_backend.tuner.tune import plan_of

HOPPER = DeviceSpec.absent("sm_90")
LLAMA, QWEN = make_problem(32, 8, 128, 16, dtype="bfloat16"), make_problem(28, 4, 128, 16, dtype="bfloat16")


def test_problems_of_one_key_are_tuned_once() -> None:
    assert distinct([LLAMA, QWEN, LLAMA, make_problem(32, 8, 128, 48, dtype="bfloat16")]) == (LLAMA, QWEN)


def test_head_counts_alone_do_not_make_a_class() -> None:
    assert anchor_class(LLAMA) == anchor_class(QWEN)
    others = [
        make_problem(32, 8, 64, 16, dtype="bfloat16"),
        make_problem(32, 8, 128, 128, dtype="bfloat16"),
        make_problem(32, 8, 128, 16, dtype="bfloat16", window=128),
        make_problem(32, 8, 128, 16, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
        make_problem(32, 8, 128, 16, dtype="float16"),
    ]
    assert len({anchor_class(problem) for problem in [LLAMA, *others]}) == 6


def test_the_shipped_list_has_few_anchors() -> None:
    assert len({anchor_class(problem) for problem in shipped_now().values()}) == 2
    everything = distinct(problems().values())
    assert len({anchor_class(problem) for problem in everything}) < len(everything) / 3


def test_finalists_go_over_with_the_heads_of_the_other_problem() -> None:
    for kind in ("prefill", "decode"):
        finalists = space(kind, LLAMA, HOPPER).kept[1:7]
        found = transferred(kind, finalists, QWEN, HOPPER)
        own = space(kind, QWEN, HOPPER).kept
        assert found[0] == own[0]
        assert set(found) <= set(own)
        assert set(map(shape, found[1:])) <= set(map(shape, finalists))
        assert all(tile_of(config).heads_per_tile <= QWEN.group_size for config in found)
        # A shape can be there with several numbers of heads.
        assert 1 < len(found) < len(own) / 2


def test_a_plan_of_finalists_is_smaller_than_one_of_the_space() -> None:
    whole = plan_of(QWEN, HOPPER)
    few = plan_of(QWEN, HOPPER, finalists={kind: whole.candidates[kind][:4] for kind in whole.candidates})
    for kind in ("prefill", "decode"):
        assert len(few.candidates[kind]) < len(whole.candidates[kind])
        assert few.candidates[kind][0] == whole.candidates[kind][0]
        assert few.cases[kind] == whole.cases[kind]


def test_contiguous_keys_have_no_decode() -> None:
    assert kinds_of(make_problem(8, 8, 64, None, dtype="bfloat16", causal=False)) == ("prefill",)


def test_an_anchor_takes_most_of_the_time_and_the_others_of_its_class_alike() -> None:
    kinds = ("prefill", "decode")
    anchor, other, *rest = shares([LLAMA, QWEN, make_problem(32, 8, 128, 128, dtype="bfloat16")], [], HOPPER, kinds)
    assert anchor > 2 * other > 0
    assert rest[0] > 2 * other
    assert shares([LLAMA, QWEN], [anchor_class(LLAMA)], HOPPER, kinds)[0] < anchor
    assert shares([LLAMA], [], HOPPER, ("decode",))[0] < anchor
