"""Windows and soft caps in ``LLM(...)`` on the CPU: greedy tokens and log-probabilities equal vLLM's own backend's."""

import pytest

from tests.engine.faults import CAP_FAULT, FAULTS, SINKS_FAULT, WINDOW_FAULT
from tl_backend.testing.checkpoint import write_checkpoint

WINDOW = 40  # Longer than a block of 32, shorter than most prompts, and no multiple of a tile.
MODELS = {
    "mistral": {"architecture": "mistral"},
    "gemma2": {"architecture": "gemma2", "soft_cap": 5.0},
    # Two head sizes. vLLM gives all layers pages of one size in bytes. Where there are four kv heads of 32, and one of
    # 64 in the layers without a window, these have blocks of 64 tokens, the others of 32.
    "gemma4": {"architecture": "gemma4", "num_kv_heads": 4, "num_global_kv_heads": 1},
    # The other way round; and the last two layers read the cache of the first two.
    "gemma4-shared": {"architecture": "gemma4", "num_layers": 4, "num_kv_shared_layers": 2},
    "gpt-oss": {"architecture": "gpt_oss"},
}
MODEL_FAULTS = {"gemma2": [CAP_FAULT], "gpt-oss": [SINKS_FAULT]}
SHAPE = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 32, "sliding_window": WINDOW, "seed": 11}


@pytest.fixture(params=MODELS)
def model(request, tmp_path_factory):
    name = request.param
    folder = write_checkpoint(tmp_path_factory.mktemp(name), **SHAPE | MODELS[name])
    return folder, [*FAULTS, WINDOW_FAULT, *MODEL_FAULTS.get(name, [])]


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
