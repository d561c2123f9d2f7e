"""The list of models, and the problems of a config.json."""

from __future__ import annotations

from typing import Any

import pytest

from tl_backend.configs.key import ProblemKey
from tl_backend.configs.models import MODELS, model_from_hf_config, problem_from_hf_config, problems, shipped_now
from tl_backend.errors import InvalidInputError, UnsupportedError

BY_NAME = {model.name: model for model in MODELS}

# What matters here of the models' config.json.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
    "llama-3-70b": {"model_type": "llama", "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8},
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
        "sliding_window": 131072, "use_sliding_window": False,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "head_dim": 128, "num_attention_heads": 32,
        "num_key_value_heads": 8, "sliding_window": None, "use_sliding_window": False,
    },
    "gemma-2-9b": {
        "model_type": "gemma2", "hidden_size": 3584, "head_dim": 256, "num_attention_heads": 16,
        "num_key_value_heads": 8, "sliding_window": 4096, "attn_logit_softcapping": 50.0, "torch_dtype": "float32",
    },
    "gemma-3-27b": {
        "model_type": "gemma3", "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 5376, "head_dim": 128, "num_attention_heads": 32,
            "num_key_value_heads": 16, "sliding_window": 1024, "sliding_window_pattern": 6,
        },
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "head_dim": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "phi-4": {
        "model_type": "phi3", "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 10,
        "sliding_window": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_the_list_is_what_the_models_config_says(name: str) -> None:
    assert model_from_hf_config(CONFIGS[name], name=name) == BY_NAME[name]


def test_mistrals_window_came_and_went() -> None:
    config = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    windows = [model_from_hf_config(config | {"sliding_window": window}).windows for window in (4096, None)]
    assert windows == [(4096,), (None,)]
    assert BY_NAME["mistral-7b"].windows == (4096, None)


@pytest.mark.parametrize(
    ("name", "tp_size", "heads"),
    [
        ("llama-3-8b", 8, (4, 1)),
        ("llama-3-70b", 4, (16, 2)),
        ("qwen2.5-7b", 4, (7, 1)),
        ("qwen2.5-7b", 8, None),  # 28 heads.
        ("phi-4", 2, (20, 5)),
        ("phi-4", 4, None),  # 10 kv heads.
        ("phi-4", 20, (2, 1)),  # Each kv head on two ranks.
    ],
)
def test_heads_of_a_rank(name: str, tp_size: int, heads: tuple[int, int] | None) -> None:
    found = BY_NAME[name].problems(tp_size=tp_size)
    assert [(problem.num_q_heads, problem.num_kv_heads) for problem in found] == ([] if heads is None else [heads])


def test_names_of_problems() -> None:
    named = problems()
    assert named["gemma-2-9b tp2 page16 window4096"].window == 4096
    assert named["gemma-2-9b tp2 page16"].window is None
    assert named["gpt-oss-120b tp8 page128 window128"].sinks_dtype == "bfloat16"
    assert {model.name for model in MODELS} == {name.split()[0] for name in named}
    assert named.items() >= shipped_now().items()
    assert len(set(map(ProblemKey.of, shipped_now().values()))) == len(shipped_now()) == 8


def test_problems_of_a_config() -> None:
    windowed, full = problem_from_hf_config(CONFIGS["gemma-2-9b"], tp_size=2, page_size=128, dtype="float16")
    assert (windowed.window, full.window) == (4096, None)
    assert (full.num_q_heads, full.num_kv_heads, full.page_size, full.dtype, full.soft_cap) == (
        8,
        4,
        128,
        "float16",
        50,
    )


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({}, InvalidInputError, "num_attention_heads of model: got None; a positive number is needed"),
        ({"num_attention_heads": "32"}, InvalidInputError, "got '32'; a positive number"),
        ({"num_attention_heads": 32, "hidden_size": -1}, InvalidInputError, "hidden_size of model: got -1"),
        (
            {"num_attention_heads": 30, "head_dim": 64},
            InvalidInputError,
            "tensor-parallel size: got 4; .* 30 query heads",
        ),
        ({"num_attention_heads": 32, "head_dim": 72}, UnsupportedError, "head size: got 72"),
        (
            {"num_attention_heads": 32, "kv_lora_rank": 512},
            UnsupportedError,
            "kv_lora_rank of model: got 512; no kernel",
        ),
        ({"num_attention_heads": 32, "head_dim": 64, "attn_logit_softcapping": "x"}, InvalidInputError, "got 'x'"),
    ],
    ids=str,
)
def test_configs_that_are_refused(config: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        problem_from_hf_config(config, tp_size=4)
