"""Layers of one plan: checked once, seen through when they differ, and launched with what they were always passed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tl_backend.device import DeviceSpec
from tl_backend.errors import InvalidInputError, UnsupportedError
from tl_backend.ops import AttentionPlan, AttentionWorkspace, paged_attention, plan_attention, varlen_attention
from tl_backend.ops import attention as attention_module
from tl_backend.ops import layer as layer_module
from tl_backend.ops import varlen as varlen_module
from tl_backend.ops.compiled import KERNELS
from tl_backend.ops.layer import MAX_LAYERS
from tl_backend.problem import AttentionProblem
from tl_backend.testing.cases import make_problem
from tl_backend.testing.poison_run import forced_splits

A100 = DeviceSpec.absent("sm_80")
CPU = torch.device("cpu")
PROBLEM = make_problem(8, 2, 64, 16, dtype="bfloat16")
BYTES = make_problem(8, 2, 64, 16, dtype="bfloat16", kv_dtype="float8_e4m3fn")
CONTIGUOUS = make_problem(8, 2, 64, None, dtype="bfloat16", causal=False)
STARTS = torch.tensor([0, 1, 4], dtype=torch.int32)  # A decode, and a prefill of three tokens.
LENS = torch.tensor([40, 9], dtype=torch.int32)
TABLE = torch.zeros(2, 6, dtype=torch.int32)[:, :3]
Launch = tuple[str, tuple[float, ...]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Kernels that would have been launched on an A100, with their arguments."""
    found: list[Launch] = []
    monkeypatch.setattr(DeviceSpec, "of", classmethod(lambda cls, device: A100))
    monkeypatch.setattr(KERNELS, "get", lambda key: lambda *arguments: found.append((key.kind, arguments)))
    return found


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each check ran."""
    counts: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        check = getattr(module, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            counts[name] += 1
            return check(*arguments, **named)

        monkeypatch.setattr(module, name, counted)

    for module in (attention_module, varlen_module):
        for name in ("check_asked", "check_shapes_match_plan", "check_given_match_plan", "checked_scale"):
            count(module, name)
    count(layer_module, "kernel_strides")
    return counts


def step(problem: AttentionProblem = PROBLEM, num_splits: int = 3) -> tuple[AttentionPlan, AttentionWorkspace]:
    with forced_splits(num_splits):
        space = AttentionWorkspace(problem, CPU, max_num_reqs=2, max_num_tokens=4)
        return plan_of(space), space


def plan_of(space: AttentionWorkspace) -> AttentionPlan:
    return plan_attention(
        space.problem, STARTS, LENS, cu_seqlens_q_cpu=STARTS, max_seqlen_q=3, max_seqlen_k=40, workspace=space
    )


def tensors(problem: AttentionProblem = PROBLEM, rows: int = 6) -> dict[str, Any]:
    """Of a new layer: queries in a fused buffer, and two rows of padding."""
    cache = torch.zeros(5, 16, 2, 128, dtype=getattr(torch, problem.kv_dtype)).transpose(1, 2)
    return {
        "q": torch.zeros(rows, 12, 64, dtype=torch.bfloat16)[:, :8],
        "kv_cache": cache,
        "out": torch.ones(rows, 8, 64, dtype=torch.bfloat16),
    }


def run(plan: AttentionPlan, layer: dict[str, Any], **changes: Any) -> torch.Tensor:
    given = {"block_table": TABLE, "cu_seqlens_q": STARTS, "seq_lens": LENS, "max_seqlen_q": 3, "max_seqlen_k": 40}
    return paged_attention(**{**given, **layer, "plan": plan, **changes})


def expected(space: AttentionWorkspace, layer: dict[str, Any], scale: float = 0.125) -> list[Launch]:
    """By hand: strides in units of 8 elements, of a table in elements."""
    q, cache, out = (layer[name].data_ptr() for name in ("q", "kv_cache", "out"))
    partials = (space.partial_o.data_ptr(), space.partial_lse.data_ptr(), 1, 3)
    table, starts, lens = TABLE.data_ptr(), STARTS.data_ptr(), LENS.data_ptr()
    q_strides, cache_strides, out_strides = (96, 8), (512, 16, 32), (64, 8)
    none, rows = (0, 0, 0, 0, 0), len(layer["q"])
    tail = (*out_strides, 6, 0)
    decode = (q, cache, out, *none, table, starts, lens, *partials, rows, 3, scale, *q_strides, *cache_strides, *tail)
    prefill = (
        q, cache, cache, out, *none, table, starts, lens, space.work.data_ptr(), 1, rows, 3, scale,
        *q_strides, *cache_strides, 0, 0, *tail,
    )  # fmt: skip
    return [
        ("decode", decode),
        ("decode_combine", (out, 0, 0, starts, *partials, *out_strides, 0)),
        ("prefill", prefill),
    ]


def test_every_layer_passes_its_own_addresses_and_the_steps(launched: list[Launch]) -> None:
    plan, space = step()
    layers = [tensors() for _ in range(3)]
    for layer in layers:
        out = run(plan, layer)
        assert out is layer["out"]
        assert not out[4:].any()
        assert out[:4].all()
    assert launched == [launch for layer in layers for launch in expected(space, layer)]


def test_a_second_layer_is_not_checked_from_scratch(launched: list[Launch], checked: Counter[str]) -> None:
    plan, space = step()
    run(plan, tensors())
    once = dict(checked)
    assert once["check_shapes_match_plan"] == once["check_asked"] == once["check_given_match_plan"] == 1
    for _ in range(3):
        run(plan, tensors())
    assert checked == once
    with forced_splits(3):
        run(plan_of(space), tensors())  # The next step.
    assert checked == {name: 2 * count for name, count in once.items()}
    assert len(launched) == 5 * 3


DIFFERENT = {
    "a padded cache": {"kv_cache": torch.zeros(5, 2, 16, 136, dtype=torch.bfloat16)[..., :128]},
    "more blocks": {"kv_cache": torch.zeros(7, 16, 2, 128, dtype=torch.bfloat16).transpose(1, 2)},
    "queries without a fused buffer": {"q": torch.zeros(6, 8, 64, dtype=torch.bfloat16)},
    "no padding": {name: torch.zeros(4, 8, 64, dtype=torch.bfloat16) for name in ("q", "out")},
    "another table": {"block_table": torch.zeros(2, 9, dtype=torch.int32)},
    "other starts": {"cu_seqlens_q": STARTS.clone()},
    "other lengths": {"seq_lens": LENS.clone()},
    "another scale": {"softmax_scale": 0.25},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_layer_that_looks_different_is_seen(what: str, launched: list[Launch], checked: Counter[str]) -> None:
    """It is launched as by a plan that has served no other."""
    plan, space = step()
    run(plan, tensors())
    layer, before = tensors() | DIFFERENT[what], checked["check_shapes_match_plan"]
    launched.clear()
    run(plan, layer)
    assert checked["check_shapes_match_plan"] == before + 1
    among_others = launched.copy()
    launched.clear()
    with forced_splits(3):
        run(plan_of(space), layer)
    assert among_others == launched


WRONG = {
    "q of another dtype": ({"q": torch.zeros(6, 8, 64)}, "tensors: got .*'float32', 8, 64"),
    "q of other heads": ({"q": torch.zeros(6, 4, 64, dtype=torch.bfloat16)}, "tensors: got .* 4, 64"),
    "out of other rows": ({"out": torch.zeros(5, 8, 64, dtype=torch.bfloat16)}, r"tensors: .*out \[5, 8, 64\]"),
    "out of another dtype": ({"out": torch.zeros(6, 8, 64)}, r"tensors: .*out .* torch\.float32"),
    "fewer rows than the step's": (
        {name: torch.zeros(3, 8, 64, dtype=torch.bfloat16) for name in ("q", "out")},
        "tensors: .* 3 rows",
    ),
    "another page size": ({"kv_cache": torch.zeros(5, 2, 32, 128, dtype=torch.bfloat16)}, "tensors: got .* 32\\)"),
    "a cache of another dtype": (
        {"kv_cache": torch.zeros(5, 2, 16, 128, dtype=torch.float16)},
        "dtype of keys and values: got float16; the plan was made for bfloat16",
    ),
    "bytes of no 8-bit cache": (
        {"kv_cache": torch.zeros(5, 2, 16, 128, dtype=torch.uint8)},
        "dtype of keys and values: got uint8",
    ),
    "rows that lie unevenly": (
        {"q": torch.zeros(6, 8, 68, dtype=torch.bfloat16)[..., :64]},
        r"q strides: got \(544, 68, 1\)",
    ),
    "a misaligned query": (
        {"q": torch.zeros(6 * 12 * 64 + 4, dtype=torch.bfloat16)[4:].view(6, 12, 64)[:, :8]},
        r"q strides: .*address % 16 = 8",
    ),
    "a misaligned cache": (
        {"kv_cache": torch.zeros(5 * 16 * 256 + 4, dtype=torch.bfloat16)[4:].view(5, 16, 2, 128).transpose(1, 2)},
        r"kv_cache strides: .*address % 16 = 8",
    ),
    "sinks": ({"sinks": torch.zeros(8)}, "sinks: got .* without it"),
    "a scale": ({"k_scale": torch.ones(1)}, "k_scale: got .* without it"),
    "log-sum-exps": ({"lse": torch.zeros(8, 6)}, "lse: got .* without it"),
    "another mask": ({"causal": False}, "causal, window, soft_cap: got"),
    "another window": ({"window": 9}, "causal, window, soft_cap: got"),
    "a number of splits": ({"num_splits": 2}, "num_splits: got 2; a plan has chosen already"),
    "a scale of zero": ({"softmax_scale": 0.0}, "softmax_scale: got 0.0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_layer_is_refused_after_a_good_one(what: str, launched: list[Launch]) -> None:
    """Each time: a refusal is not kept."""
    plan, _ = step()
    run(plan, tensors())
    changes, message = WRONG[what]
    for _ in range(2):
        with pytest.raises(InvalidInputError, match=message):
            run(plan, tensors() | changes)
    assert len(launched) == 3


@pytest.mark.parametrize("name", ["q_scale", "out_scale"])
def test_a_feature_that_no_kernel_has_is_refused_after_a_good_layer(name: str, launched: list[Launch]) -> None:
    plan, _ = step()
    run(plan, tensors())
    with pytest.raises(UnsupportedError, match=f"{name}: got"):
        run(plan, tensors(), **{name: torch.ones(1)})


def test_an_8_bit_cache_is_its_bytes_and_scales_are_each_layers_own(launched: list[Launch]) -> None:
    plan, _ = step(BYTES)
    for _ in range(2):
        layer, scales = tensors(BYTES), {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}
        passed = []
        for cache in (layer["kv_cache"], layer["kv_cache"].view(torch.uint8)):
            launched.clear()
            run(plan, layer | {"kv_cache": cache}, **scales)
            passed.append(launched.copy())
        assert passed[0] == passed[1]
        assert passed[0][0][1][6:8] == tuple(scale.data_ptr() for scale in scales.values())


def test_a_plan_that_serves_many_steps_keeps_few(launched: list[Launch]) -> None:
    """As a caller does who never plans anew."""
    plan, space = step()
    for _ in range(2 * MAX_LAYERS + 3):
        run(plan, tensors(), seq_lens=LENS.clone())
        assert len(plan.layers) <= MAX_LAYERS
    launched.clear()
    layer = tensors()
    run(plan, layer)
    assert launched == expected(space, layer)


def contiguous(plan: AttentionPlan, keys: torch.Tensor, rows: int = 4) -> torch.Tensor:
    q, v = torch.zeros(rows, 12, 64, dtype=torch.bfloat16)[:, :8], torch.zeros(4, 2, 64, dtype=torch.bfloat16)
    return varlen_attention(q, keys, v, STARTS, STARTS, max_seqlen_q=3, max_seqlen_k=3, causal=False, plan=plan)


def test_contiguous_layers_are_checked_once(launched: list[Launch], checked: Counter[str]) -> None:
    plan, space = step(CONTIGUOUS)
    keys = [torch.zeros(4, 3, 64, dtype=torch.bfloat16)[:, :2] for _ in range(3)]
    outs = [contiguous(plan, k) for k in keys]
    assert checked["check_shapes_match_plan"] == 1
    starts = STARTS.data_ptr()
    for (kind, passed), k, out in zip(launched, keys, outs, strict=True):
        assert kind == "prefill"
        assert (passed[1], passed[3], passed[4:9]) == (k.data_ptr(), out.data_ptr(), (0,) * 5)
        assert passed[9:] == (
            starts, starts, starts, space.work.data_ptr(), 2, 4, 3, 0.125,
            96, 8, 24, 8, 0, 16, 8, 64, 8, 1, 0,
        )  # fmt: skip
    contiguous(plan, keys[0].contiguous())
    assert checked["check_shapes_match_plan"] == 2
    with pytest.raises(InvalidInputError, match="dtype of keys and values: got float16"):
        contiguous(plan, keys[0].to(torch.float16))
    with pytest.raises(InvalidInputError, match=r"tensors: got .* 3 rows"):
        contiguous(plan, keys[0], rows=3)
