"""Tiny random-weight checkpoints that vLLM and transformers load without a hub.

Weights are drawn so that every stage of the model has unit variance and attention scores have the standard deviation
that was asked for. With the 1e-3 weights of ``load_format="dummy"`` scores are near zero, attention is a plain average,
and a wrong scale, mask or head order changes no token: an equality test on such a model proves nothing.
"""

from __future__ import annotations

import json
import math
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tl_backend.errors import InvalidInputError, describe

if TYPE_CHECKING:
    import torch

Architecture = Literal["llama", "qwen3", "mistral", "gemma2"]

NUM_BYTES = 256
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
VOCAB_SIZE = NUM_BYTES + 3
PRINTABLE = string.ascii_letters + string.digits + string.punctuation + " "
RMS_NORM_EPS = 1e-6


def write_llama(
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
    alphabet: str = PRINTABLE,
    dtype: str = "float32",
) -> Path:
    """Write config, weights and a byte-level tokenizer to ``path``.

    Greedy text is of ``alphabet`` alone: the output rows of all other tokens are zero, so their logit is 0, which the
    best of some dozens of random ones exceeds. The end-of-sequence token is among the zero rows: it never comes.

    Args:
        path: a folder; made if missing.
        architecture: "llama", "qwen3" (normalises q and k a head), "mistral" (a sliding window in every layer) or
            "gemma2" (a window in every second layer, a soft cap on the attention's logits, tied embeddings).
        num_layers, num_q_heads, num_kv_heads, head_dim: as in the config.
        hidden_size: default ``num_q_heads * head_dim``.
        intermediate_size: default twice ``hidden_size``.
        max_position_embeddings: longest context.
        sliding_window: keys of the window, for "mistral" and "gemma2".
        soft_cap: of the attention's logits, for "gemma2".
        seed: same seed, same bytes.
        qk_gain: standard deviation of the scaled attention scores ``q @ k / sqrt(head_dim)``, near enough.
        alphabet: ASCII characters that may be generated. Fewer of them leave wider gaps between the best two logits.
        dtype: of the stored weights, a torch dtype's name.

    Returns:
        ``path``, as a Path.

    Raises:
        InvalidInputError: head counts that do not divide, or an unknown architecture.
    """
    hidden_size = hidden_size or num_q_heads * head_dim
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise InvalidInputError(
            describe(
                "head counts",
                value=f"{num_q_heads} q heads, {num_kv_heads} kv heads",
                limit="q heads must be a multiple of kv heads",
                remedy="Choose other counts.",
            )
        )
    config = {
        **_architecture_fields(architecture, num_layers, head_dim, sliding_window, soft_cap),
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_q_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size or 2 * hidden_size,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": architecture == "gemma2",
        "torch_dtype": dtype,
        "bos_token_id": NUM_BYTES,
        "eos_token_id": NUM_BYTES + 1,
        "pad_token_id": NUM_BYTES + 2,
    }
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", config)
    _write_weights(path / "model.safetensors", config, seed=seed, qk_gain=qk_gain, alphabet=alphabet)
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


def _architecture_fields(
    architecture: Architecture, num_layers: int, head_dim: int, sliding_window: int | None, soft_cap: float | None
) -> dict[str, Any]:
    names = {
        "llama": "LlamaForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "mistral": "MistralForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
    }
    if architecture not in names:
        raise InvalidInputError(
            describe("architecture", value=architecture, limit=" or ".join(names), remedy="Choose one of these.")
        )
    fields: dict[str, Any] = {"architectures": [names[architecture]], "model_type": architecture}
    if architecture in ("mistral", "gemma2"):
        fields["sliding_window"] = sliding_window
    if architecture == "gemma2":
        fields |= {
            "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(num_layers)],
            "attn_logit_softcapping": soft_cap,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
        }
    return fields


def _byte_characters() -> list[str]:
    """GPT-2's mapping of bytes to printable characters, by byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spare = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte) if byte in kept else chr(next(spare)) for byte in range(NUM_BYTES)]


def _write_weights(path: Path, config: dict[str, Any], *, seed: int, qk_gain: float, alphabet: str) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])

    def linear(fan_out: int, fan_in: int, gain: float = 1.0) -> torch.Tensor:
        # Variance gain^2 / fan_in turns unit-variance inputs into outputs of standard deviation `gain`.
        return torch.randn(fan_out, fan_in, generator=generator) * (gain / math.sqrt(fan_in))

    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    # The score q @ k / sqrt(D) of independent unit-variance q and k has standard deviation 1: each side takes the root.
    # Qwen3's q and k norms erase the projections' scale, and their weights set it instead.
    normed = config["model_type"] == "qwen3"
    qk_scale = math.sqrt(qk_gain)
    # Gemma multiplies embeddings by sqrt(hidden), ties the output to them and adds 1 to the weights of its norms. The
    # norm after a block weighs it four times the token itself, which would win every step.
    gemma = config["model_type"] == "gemma2"
    unit, after = (torch.zeros(hidden), torch.full((hidden,), 3.0)) if gemma else (torch.ones(hidden),) * 2
    embedding = torch.randn(VOCAB_SIZE, hidden, generator=generator)
    output = linear(VOCAB_SIZE, hidden) * _rows_of(alphabet)[:, None]
    tensors = {
        "model.embed_tokens.weight": embedding / math.sqrt(hidden) if gemma else embedding,
        "model.norm.weight": unit,
    }
    if not gemma:
        tensors["lm_head.weight"] = output
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": unit.clone(),
            f"{prefix}.post_attention_layernorm.weight": after.clone(),
            f"{prefix}.self_attn.q_proj.weight": linear(q_rows, hidden, qk_scale),
            f"{prefix}.self_attn.k_proj.weight": linear(kv_rows, hidden, qk_scale),
            f"{prefix}.self_attn.v_proj.weight": linear(kv_rows, hidden),
            # Attention averages values and shrinks them; the gain lets it weigh as much as the residual stream.
            f"{prefix}.self_attn.o_proj.weight": linear(hidden, q_rows, 2.0),
            f"{prefix}.mlp.gate_proj.weight": linear(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": linear(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": linear(hidden, inner),
        }
        if gemma:
            tensors |= {
                f"{prefix}.pre_feedforward_layernorm.weight": unit.clone(),
                f"{prefix}.post_feedforward_layernorm.weight": after.clone(),
            }
        if normed:
            tensors |= {
                f"{prefix}.self_attn.q_norm.weight": torch.full((head_dim,), qk_scale),
                f"{prefix}.self_attn.k_norm.weight": torch.full((head_dim,), qk_scale),
            }
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _rows_of(alphabet: str) -> torch.Tensor:
    import torch

    rows = torch.zeros(VOCAB_SIZE)
    rows[[ord(character) for character in alphabet]] = 1.0
    return rows


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
