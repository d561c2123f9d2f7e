"""Tiny random-weight checkpoints that vLLM and transformers load without a hub.

Weights are drawn so that every stage of the model has unit variance and attention scores have the standard deviation
that was asked for. With the 1e-3 weights of ``load_format="dummy"`` scores are near zero, attention is a plain average,
and a wrong scale, mask or head order changes no token: an equality test on such a model proves nothing.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any, Literal

from tl_backend.errors import InvalidInputError, describe

Architecture = Literal["llama", "qwen3", "mistral", "gemma2", "gemma4", "gpt_oss"]

NUM_BYTES = 256
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
VOCAB_SIZE = NUM_BYTES + 3
PRINTABLE = string.ascii_letters + string.digits + string.punctuation + " "
# gpt-oss's experts. All are chosen for every token: where two are equally good, rounding would choose between them.
NUM_EXPERTS = 4
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


def write_checkpoint(
    path: str | Path,
    *,
    architecture: Architecture = "llama",
    num_layers: int = 2,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    max_position_embeddings: int = 4096,
    seed: int = 0,
    qk_gain: float = 4.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    global_head_dim: int | None = None,
    num_global_kv_heads: int | None = None,
    num_kv_shared_layers: int = 0,
    alphabet: str = PRINTABLE,
    dtype: str = "float32",
) -> Path:
    """Write config, weights and a byte-level tokenizer to ``path``.

    Greedy text is of ``alphabet`` alone: the output rows of all other tokens are zero, so their logit is 0, which the
    best of some dozens of random ones exceeds. The end-of-sequence token is among the zero rows: it never comes. The
    Gemmas tie these rows to their embeddings: their text is of any token.

    Args:
        path: a folder; made if missing.
        architecture: "llama", "qwen3" (normalises q and k a head), "mistral" (a sliding window in every layer),
            "gemma2" (a window in every second layer, the first one first; a soft cap on the attention's logits),
            "gemma4" (a window and ``head_dim`` in every second layer, ``global_head_dim`` in the others) or "gpt_oss"
            (attention sinks, biases, experts, a window in every second layer).
        num_layers: even for "gemma4", whose last layer has no window.
        num_q_heads, num_kv_heads, head_dim: as in the config.
        hidden_size: default ``num_q_heads * head_dim``.
        intermediate_size: default twice ``hidden_size``.
        max_position_embeddings: longest context.
        seed: same seed, same bytes.
        qk_gain: standard deviation of the scaled attention scores ``q @ k * softmax_scale``, near enough.
        sliding_window: keys of the window; without effect on "llama" and "qwen3".
        soft_cap: of the attention's logits, for "gemma2".
        global_head_dim: of "gemma4"'s layers without a window; default twice ``head_dim``.
        num_global_kv_heads: of "gemma4"'s layers without a window, whose keys then are their values, too. Default:
            ``num_kv_heads``, and values of their own.
        num_kv_shared_layers: so many last layers of "gemma4" have no keys and values: they read the cache of the last
            layer of their kind before them.
        alphabet: ASCII characters that may be generated. Fewer of them leave wider gaps between the best two logits.
        dtype: of the stored weights, a torch dtype's name.

    Returns:
        ``path``, as a Path.

    Raises:
        InvalidInputError: head counts that do not divide, an unknown architecture, or layers that "gemma4" cannot have.
    """
    import torch
    from safetensors.torch import save_file

    from tl_backend.testing.weights import draw_weights

    _check(architecture, num_layers, num_q_heads, (num_kv_heads, num_global_kv_heads), num_kv_shared_layers)
    hidden_size = hidden_size or num_q_heads * head_dim
    config: dict[str, Any] = {
        "architectures": [CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_q_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size or 2 * hidden_size,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": architecture in ("gemma2", "gemma4"),
        "torch_dtype": dtype,
        "bos_token_id": NUM_BYTES,
        "eos_token_id": NUM_BYTES + 1,
        "pad_token_id": NUM_BYTES + 2,
    }
    if architecture not in ("llama", "qwen3"):
        config["sliding_window"] = sliding_window
    if architecture in ("gemma2", "gemma4", "gpt_oss"):
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[layer % 2] for layer in range(num_layers)]
    config |= _own_fields(architecture, head_dim, soft_cap, max_position_embeddings)
    if architecture == "gemma4":
        config |= {
            "global_head_dim": global_head_dim or 2 * head_dim,
            "num_global_key_value_heads": num_global_kv_heads,
            "attention_k_eq_v": num_global_kv_heads is not None,
            "num_kv_shared_layers": num_kv_shared_layers,
        }
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", config)
    weights = draw_weights(config, seed=seed, qk_gain=qk_gain, alphabet=alphabet)
    stored = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    write_byte_tokenizer(path)
    return path


def write_byte_tokenizer(path: Path) -> None:
    """Write a tokenizer whose token i is byte i; it adds no special tokens to a prompt."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # Byte-level pre-tokenizers write each byte as one printable character; without merges, one character is one token.
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (BOS, EOS, PAD)])
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
        },
    )


def _check(
    architecture: str,
    num_layers: int,
    num_q_heads: int,
    kv_heads: tuple[int, int | None],
    num_kv_shared_layers: int,
) -> None:
    if architecture not in CLASSES:
        raise InvalidInputError(
            describe("architecture", value=architecture, limit=" or ".join(CLASSES), remedy="Choose one of these.")
        )
    for num_kv_heads in kv_heads:
        if num_kv_heads is not None and (num_kv_heads < 1 or num_q_heads % num_kv_heads):
            raise InvalidInputError(
                describe(
                    "head counts",
                    value=f"{num_q_heads} q heads, {num_kv_heads} kv heads",
                    limit="q heads must be a multiple of kv heads",
                    remedy="Choose other counts.",
                )
            )
    if architecture == "gemma4" and (num_layers % 2 or num_layers - num_kv_shared_layers < 2):
        raise InvalidInputError(
            describe(
                "layers",
                value=f"{num_layers}, {num_kv_shared_layers} of them without keys and values",
                limit="an even number, and one layer of each kind before those that read its cache",
                remedy="Choose other counts.",
            )
        )


def _own_fields(
    architecture: Architecture, head_dim: int, soft_cap: float | None, max_position_embeddings: int
) -> dict[str, Any]:
    """What one architecture's config alone has, or has otherwise."""
    if architecture == "gemma2":
        return {
            "rope_theta": 10000.0,
            "attn_logit_softcapping": soft_cap,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
        }
    if architecture == "gemma4":
        return {
            "model_type": "gemma4_text",
            "final_logit_softcapping": None,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 0,  # No embeddings a layer: they are no part of attention.
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0,
                },
            },
        }
    if architecture == "gpt_oss":
        return {
            "attention_bias": True,
            "rms_norm_eps": 1e-5,  # vLLM takes it for granted.
            "num_local_experts": NUM_EXPERTS,
            "num_experts_per_tok": NUM_EXPERTS,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": max_position_embeddings // 4,
            },
        }
    return {"rope_theta": 10000.0}


def _byte_characters() -> list[str]:
    """GPT-2's mapping of bytes to printable characters, by byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spare = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte) if byte in kept else chr(next(spare)) for byte in range(NUM_BYTES)]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
