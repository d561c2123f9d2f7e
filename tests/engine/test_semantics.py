"""Windows and soft caps in ``LLM(...)`` on the CPU: greedy tokens and log-probabilities equal vLLM's own backend's."""

import pytest

from tests.engine.faults import CAP_FAULT, FAULTS, WINDOW_FAULT
from tl_backend.testing.checkpoint import write_llama

WINDOW = 40  # Longer than a block of 32, shorter than most prompts, and no multiple of a tile.
MODELS = {
    "mistral": {"architecture": "mistral", "sliding_window": WINDOW},
    "gemma2": {"architecture": "gemma2", "sliding_window": WINDOW, "soft_cap": 5.0},
}
MODEL_FAULTS = {"mistral": (*FAULTS, WINDOW_FAULT), "gemma2": (*FAULTS, WINDOW_FAULT, CAP_FAULT)}
SHAPE = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 32, "seed": 11}


@pytest.fixture(params=MODELS)
def model(request, tmp_path_factory):
    name = request.param
    return write_llama(tmp_path_factory.mktemp(name), **SHAPE, **MODELS[name]), MODEL_FAULTS[name]


def test_tokens_equal_the_builtin_backends_and_planted_faults_show(model, run_llm, fault_env, compare):
    model, faults = model
    builtin, launches = run_llm(model, None)
    assert launches == {}
    task = {"faults": ["", *faults], "fault_file": fault_env["ATTENTION_FAULT_FILE"]}
    ours, launches = run_llm(model, "tilelang", {"TL_BACKEND_CPU": "1"} | fault_env, **task)
    assert min(launches[kernel] for kernel in ("prefill", "decode", "cache_write")) > 0
    for scenario, runs in builtin[""].items():
        assert compare(ours[""][scenario]["answers"], runs["answers"]) == [], scenario
        for fault in faults:
            assert compare(ours[fault][scenario]["answers"], runs["answers"]) != [], (scenario, fault)
