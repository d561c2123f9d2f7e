"""Random weights under which every stage of a model has unit variance, and attention scores the deviation asked for."""

from __future__ import annotations

import math
from typing import Any

import torch

BIAS_GAIN = 0.1  # Of a linear's outputs: a missing bias would show, and scores keep their deviation.


def draw_weights(config: dict[str, Any], *, seed: int, qk_gain: float, alphabet: str) -> dict[str, torch.Tensor]:
    """Every tensor of the model, under the names of its checkpoints, in float32.

    Args:
        config: as ``checkpoint.write_checkpoint`` writes it to config.json.
        seed: same seed, same tensors.
        qk_gain: standard deviation of the scaled attention scores.
        alphabet: ASCII characters whose output rows are not zero; without effect where they are tied to the embedding.
    """
    draw = _Draw(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    # Gemma multiplies embeddings by sqrt(hidden) and ties the output to them.
    tied = config["tie_word_embeddings"]
    embedding = draw.normal(vocab, hidden)
    output = draw.linear(vocab, hidden) * _rows_of(alphabet, vocab)[:, None]
    tensors = {
        "model.embed_tokens.weight": embedding / math.sqrt(hidden) if tied else embedding,
        "model.norm.weight": _norm(config, hidden),
    }
    if not tied:
        tensors["lm_head.weight"] = output
    for layer in range(config["num_hidden_layers"]):
        parts = {
            **_norms(config),
            **{f"self_attn.{name}": tensor for name, tensor in _attention(draw, config, layer, qk_gain).items()},
            **{f"mlp.{name}": tensor for name, tensor in _mlp(draw, config).items()},
        }
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in parts.items()}
    return tensors


class _Draw:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)

    def linear(self, fan_out: int, fan_in: int, gain: float = 1.0) -> torch.Tensor:
        # Variance gain^2 / fan_in turns unit-variance inputs into outputs of standard deviation `gain`.
        return self.normal(fan_out, fan_in) * (gain / math.sqrt(fan_in))


def _norm(config: dict[str, Any], size: int, gain: float = 1.0) -> torch.Tensor:
    # Gemma 2 adds 1 to the weights of its norms.
    return torch.full((size,), gain - 1.0 if config["model_type"] == "gemma2" else gain)


def _norms(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    hidden = config["hidden_size"]
    # Where the output is tied, a token would follow itself for ever: its embedding is in the residual stream, and gives
    # it a logit of sqrt(hidden) where nothing else is there. Norms after the 2 * layers blocks make the stream so much
    # larger that this logit is 1, as that of any other token.
    gain = math.sqrt(hidden / (2 * config["num_hidden_layers"])) if config["tie_word_embeddings"] else 1.0
    norms = {
        "input_layernorm.weight": _norm(config, hidden),
        "post_attention_layernorm.weight": _norm(config, hidden, gain),
    }
    if config["model_type"] in ("gemma2", "gemma4_text"):
        norms |= {
            "pre_feedforward_layernorm.weight": _norm(config, hidden),
            "post_feedforward_layernorm.weight": _norm(config, hidden, gain),
        }
    if config["model_type"] == "gemma4_text":
        norms["layer_scalar"] = torch.ones(1)
    return norms


def _attention(draw: _Draw, config: dict[str, Any], layer: int, qk_gain: float) -> dict[str, torch.Tensor]:
    family, hidden, num_q_heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    head_dim, num_kv_heads = config["head_dim"], config["num_key_value_heads"]
    keys_are_values = False
    if family == "gemma4_text" and config["layer_types"][layer] == "full_attention":
        head_dim, keys_are_values = config["global_head_dim"], config["attention_k_eq_v"]
        num_kv_heads = config["num_global_key_value_heads"] if keys_are_values else num_kv_heads
    q_rows, kv_rows = num_q_heads * head_dim, num_kv_heads * head_dim
    # The score q @ k / sqrt(D) of independent unit-variance q and k has standard deviation 1: each side takes the root.
    qk_scale = math.sqrt(qk_gain)
    if family == "gpt_oss":
        qk_scale /= 1 + 0.1 * math.log(config["rope_parameters"]["factor"])  # YaRN multiplies both by the divisor.
    if family == "gemma4_text":
        qk_scale *= head_dim**-0.25  # It does not divide scores by sqrt(D).
    tensors = {
        "q_proj.weight": draw.linear(q_rows, hidden, qk_scale),
        "k_proj.weight": draw.linear(kv_rows, hidden, qk_scale),
        "v_proj.weight": draw.linear(kv_rows, hidden),
        # Attention averages values and shrinks them; the gain lets it weigh as much as the residual stream.
        "o_proj.weight": draw.linear(hidden, q_rows, 2.0),
    }
    if family in ("qwen3", "gemma4_text"):
        # Norms of q and k erase the projections' scale, and their weights set it instead.
        tensors |= {f"{side}_norm.weight": torch.full((head_dim,), qk_scale) for side in "qk"}
    if config["attention_bias"]:
        gains = {"q": qk_scale, "k": qk_scale, "v": 1.0, "o": 1.0}
        for side, gain in gains.items():
            tensors[f"{side}_proj.bias"] = draw.normal(tensors[f"{side}_proj.weight"].shape[0]) * BIAS_GAIN * gain
    if family == "gpt_oss":
        # Of the size of a row's largest scores, two standard deviations and more: some heads give most weight to the
        # sink, some little.
        tensors["sinks"] = qk_gain * (2 + draw.normal(num_q_heads))
    shared = layer >= config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
    absent = ("k_proj", "v_proj", "k_norm") if shared else ("v_proj",) if keys_are_values else ()
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(absent)}


def _mlp(draw: _Draw, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if config["model_type"] != "gpt_oss":
        return {
            "gate_proj.weight": draw.linear(inner, hidden),
            "up_proj.weight": draw.linear(inner, hidden),
            "down_proj.weight": draw.linear(hidden, inner),
        }
    experts = range(config["num_local_experts"])
    # An expert's matrices are stored transposed; gate and up are its even and its odd columns.
    return {
        "router.weight": draw.linear(len(experts), hidden),
        "router.bias": draw.normal(len(experts)) * BIAS_GAIN,
        "experts.gate_up_proj": torch.stack([draw.linear(2 * inner, hidden).T.contiguous() for _ in experts]),
        "experts.gate_up_proj_bias": draw.normal(len(experts), 2 * inner) * BIAS_GAIN,
        "experts.down_proj": torch.stack([draw.linear(hidden, inner).T.contiguous() for _ in experts]),
        "experts.down_proj_bias": draw.normal(len(experts), hidden) * BIAS_GAIN,
    }


def _rows_of(alphabet: str, vocab_size: int) -> torch.Tensor:
    rows = torch.zeros(vocab_size)
    rows[[ord(character) for character in alphabet]] = 1.0
    return rows
