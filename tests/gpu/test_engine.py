"""What of ``tests.gpu.engine`` holds without a GPU: what it runs, and how it judges."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.faults import CAP_FAULT, FAULTS, SINKS_FAULT, WINDOW_FAULT
from tests.gpu.engine import MODELS, Comparison, Run, comparisons, problems, rows_of

RUNS = [Run("llama 32/8 D 128", backend) for backend in ("FLASH_ATTN", "TRITON_ATTN", "TILELANG")]
COMPARISON = Comparison("eager", *RUNS)


def test_every_model_is_compared_and_every_fault_is_planted() -> None:
    ours = [comparison.ours for comparison in comparisons()]
    assert len(set(ours)) == len(ours)
    assert {run.model for run in ours if run.faults} == set(MODELS)
    assert {fault for run in ours for fault in run.faults} == {*FAULTS, WINDOW_FAULT, CAP_FAULT, SINKS_FAULT}
    assert [set(run.faults) for run in ours if run.cache == "fp8"] == [{*FAULTS, WINDOW_FAULT, CAP_FAULT}]


def test_a_comparison_is_of_one_model_and_cache() -> None:
    for comparison in comparisons():
        runs = (comparison.reference, comparison.peer, comparison.ours)
        assert len(set(runs)) == 3
        assert len({(run.model, run.cache) for run in runs}) == 1
        assert comparison.ours.backend == "TILELANG"
        assert "TILELANG" not in (comparison.reference.backend, comparison.peer.backend)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (Run("qwen3 16/8 D 128", "TILELANG"), {(128, "bfloat16", None, None, None)}),
        (
            Run("gpt-oss 16/2 D 64", "TILELANG"),
            {(64, "bfloat16", w, None, s) for w in (None, 128) for s in (None, "bfloat16")}
            | {(64, "bfloat16", 129, None, "bfloat16")},
        ),
        (
            Run("gemma2 8/4 D 256", "TILELANG", cache="fp8"),
            {(256, "float8_e4m3fn", w, c, None) for w in (None, 128) for c in (None, 8.0)}
            | {(256, "float8_e4m3fn", 129, 8.0, None)},
        ),
    ],
)
def test_kernels_of_layers_and_of_faults_are_compiled_first(run: Run, expected: set[tuple[Any, ...]]) -> None:
    found = problems(run)
    assert {(p.head_dim, p.kv_dtype, p.window, p.soft_cap, p.sinks_dtype) for p in found} == expected
    assert {p.page_size for p in found} == {16}


def answers(prompt: float, generated: float = 0.0) -> dict[str, Any]:
    """Of an engine whose log-probabilities are off by so much."""
    answer = {"tokens": [1, 2], "logprobs": [generated - 1] * 2, "prompt_logprobs": [prompt - 1] * 3}
    return {"answers": [answer], "launches": {}, "rows": {}}


def verdicts(ours: dict[str, dict[str, Any]], peer: dict[str, Any]) -> list[bool]:
    reference, other, tilelang = RUNS
    return [row["ok"] for row in rows_of(COMPARISON, {reference: {"": answers(0)}, other: {"": peer}, tilelang: ours})]


def test_within_the_noise_and_faults_outside() -> None:
    noise = answers(0.1, 0.2)
    assert verdicts({"": answers(0.12, 0.24), "fault": answers(0.31)}, noise) == [True, True, True]
    assert verdicts({"": answers(0.13, 0.2)}, noise) == [True, False]
    assert verdicts({"": answers(0.1, 0.26)}, noise) == [True, False]
    assert verdicts({"": answers(0.1, 0.2), "fault": answers(0.29, 1.0)}, noise) == [True, True, False]


def test_a_peer_without_any_noise_is_the_reference_itself() -> None:
    assert verdicts({"": answers(0)}, answers(0))[0] is False
