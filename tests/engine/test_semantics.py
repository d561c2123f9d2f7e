"""Windows, soft caps, sinks, two head sizes and shared caches in ``LLM(...)`` on the CPU.

Greedy tokens and log-probabilities equal those of vLLM's own backend, and no longer do with a planted fault.
"""

import json
from pathlib import Path

import pytest

from tests.engine.faults import CAP_FAULT, FAULTS, SINKS_FAULT, WINDOW_FAULT
from tl_backend.testing.checkpoint import write_checkpoint

WINDOW = 40  # Longer than a block of 32, shorter than most prompts, and no multiple of a tile.
MODELS = {
    "mistral": {"architecture": "mistral"},
    "gemma2": {"architecture": "gemma2", "soft_cap": 5.0},
    "gemma4": {"architecture": "gemma4", "num_kv_heads": 4, "num_global_kv_heads": 1},
    # The last two layers read the cache of the first two.
    "gemma4-shared": {"architecture": "gemma4", "num_layers": 4, "num_kv_shared_layers": 2},
    "gpt-oss": {"architecture": "gpt_oss"},
}
# (head size, page size, window) of the layers. Where blocks of 32 tokens differ in bytes, vLLM gives the smaller more
# tokens: four heads of 32 take twice as much as one of 64, and two heads of 32 half as much as two of 64.
LAYERS = {
    "mistral": [[32, 32, WINDOW]],
    "gemma2": [[32, 32, WINDOW], [32, 32, None]],
    "gemma4": [[32, 32, WINDOW], [64, 64, None]],
    "gemma4-shared": [[32, 64, WINDOW], [64, 32, None]],
    "gpt-oss": [[32, 32, WINDOW], [32, 32, None]],
}
MODEL_FAULTS = {"gemma2": [CAP_FAULT], "gpt-oss": [SINKS_FAULT]}
SHAPE = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 32, "sliding_window": WINDOW, "seed": 11}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_the_builtin_backends_and_planted_faults_show(name, run_llm, fault_env, compare, tmp_path):
    model = write_checkpoint(tmp_path, **SHAPE | MODELS[name])
    faults = [*FAULTS, WINDOW_FAULT, *MODEL_FAULTS.get(name, [])]
    builtin, launches = run_llm(model, None)
    assert launches == {}
    fault_file = Path(fault_env["ATTENTION_FAULT_FILE"])
    task = {"faults": ["", *faults], "fault_file": str(fault_file)}
    ours, launches = run_llm(model, "tilelang", {"TL_BACKEND_CPU": "1"} | fault_env, **task)
    assert min(launches[kernel] for kernel in ("prefill", "decode", "cache_write")) > 0
    # A layer writes once a step and decodes at most once: fewer writes than decodes only if some layers never write.
    assert (launches["cache_write"] < launches["decode"]) == ("num_kv_shared_layers" in MODELS[name])
    layers = json.loads(fault_file.with_name("problems").read_text())
    assert sorted(layers, key=str) == sorted(LAYERS[name], key=str)
    for scenario, runs in builtin[""].items():
        assert compare(ours[""][scenario]["answers"], runs["answers"]) == [], scenario
        for fault in faults:
            assert compare(ours[fault][scenario]["answers"], runs["answers"]) != [], (scenario, fault)
