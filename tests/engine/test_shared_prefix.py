"""Shared prefixes, an odd longest context and LoRA, on layers with and without a window.

Greedy tokens equal vLLM's own backend's. One engine each: CASES.md B12, B26, B28, B29.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from tl_backend.testing.checkpoint import write_checkpoint

SCENARIOS = ["shared_prefix", "long_prompt", "adapters"]
LAYERS, HEADS, HEAD_DIM, RANK = 2, 8, 32, 8
ENGINE = {
    "max_model_len": 9416,  # 295 blocks of 32 tokens.
    "num_gpu_blocks_override": 700,
    "max_num_seqs": 16,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": RANK,
}


def write_adapter(folder, *, gain):
    """Of the query projections."""
    folder.mkdir()
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    generator = torch.Generator().manual_seed(0)
    hidden, tensors = HEADS * HEAD_DIM, {}
    for layer in range(LAYERS):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) / hidden**0.5
        tensors[f"{prefix}.lora_B.weight"] = gain * torch.randn(hidden, RANK, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    model = write_checkpoint(
        tmp_path_factory.mktemp("gemma2"),
        architecture="gemma2",
        num_layers=LAYERS,
        num_q_heads=HEADS,
        head_dim=HEAD_DIM,
        sliding_window=40,
        soft_cap=5.0,
        max_position_embeddings=16384,
        seed=5,
    )
    adapters = {name: write_adapter(folder / name, gain=gain) for name, gain in (("zero", 0.0), ("real", 2.0))}
    return {"model": model, "engine": ENGINE, "scenarios": SCENARIOS, "adapters": adapters}


@pytest.fixture(scope="module")
def builtin(run_llm, task):
    return run_llm(backend=None, **task)[0][""]


@pytest.fixture(scope="module")
def tilelang(run_llm, task):
    result, launches = run_llm(backend="tilelang", env={"TL_BACKEND_CPU": "1"}, **task)
    assert min(launches[kernel] for kernel in ("prefill", "decode", "cache_write")) > 0
    return result[""]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_tokens_equal_the_builtin_backends(scenario, tilelang, builtin, compare):
    assert compare(tilelang[scenario]["answers"], builtin[scenario]["answers"]) == []


def test_a_prefix_from_the_cache_gives_the_same_tokens(tilelang, compare):
    answers = tilelang["shared_prefix"]["answers"]
    cold, warm = answers[:16], answers[16:]
    assert min(answer["cached"] for answer in warm) >= 8 * 32
    assert compare(warm, cold) == []
    assert compare(warm, cold[1:] + cold[:1]) != []


def test_an_adapter_that_changes_nothing_gives_the_same_tokens_and_another_does_not(tilelang, compare):
    answers = tilelang["adapters"]["answers"]
    without, zero, real = answers[:3], answers[3:6], answers[6:]
    assert compare(zero, without) == []
    assert len(compare(real, without)) == 3
