"""Checkpoints load in transformers, and their attention is no average."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.testing.scores import attention_scores, dense_attention, load
from tl_backend.errors import InvalidInputError
from tl_backend.testing.checkpoint import EOS, NUM_BYTES, PRINTABLE, write_checkpoint

PROMPT = torch.tensor([list(b"The scores of this prompt are measured, layer by layer, head by head.")])
SHAPES: list[dict[str, Any]] = [
    {},
    {"architecture": "qwen3"},
    {"num_layers": 3, "num_q_heads": 7, "num_kv_heads": 1, "head_dim": 48},
    {"architecture": "qwen3", "num_q_heads": 6, "num_kv_heads": 3, "head_dim": 80, "hidden_size": 192},
    {"architecture": "mistral", "sliding_window": 40},
    {"architecture": "gemma2", "sliding_window": 40, "soft_cap": 5.0},
    {"architecture": "gemma4", "sliding_window": 40},
    {
        "architecture": "gemma4",
        "sliding_window": 40,
        "num_kv_heads": 4,
        "num_global_kv_heads": 1,
        "global_head_dim": 96,
    },
    {"architecture": "gemma4", "sliding_window": 40, "num_layers": 4, "num_kv_shared_layers": 2},
    {"architecture": "gpt_oss", "sliding_window": 40},
]
IDS = [
    *["llama", "qwen3", "llama-gqa7-d48", "qwen3-d80", "mistral", "gemma2"],
    *["gemma4", "gemma4-keys-are-values", "gemma4-shared", "gpt-oss"],
]


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_transformers_loads_every_tensor(tmp_path: Path, shape: dict[str, Any]) -> None:
    _, report = AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path, **shape), output_loading_info=True)
    assert {name: list(found) for name, found in report.items() if found} == {}


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@pytest.mark.parametrize("qk_gain", [1.5, 4.0])
def test_scores_have_the_deviation_asked_for(tmp_path: Path, shape: dict[str, Any], qk_gain: float) -> None:
    for layer, scores in enumerate(attention_scores(write_checkpoint(tmp_path, qk_gain=qk_gain, **shape), PROMPT)):
        deviation = scores.std().item()
        assert 0.75 * qk_gain < deviation < 1.35 * qk_gain, f"layer {layer}: {deviation} for {qk_gain}"
        assert deviation >= 1


def test_gemma4_has_two_head_sizes_and_shares_caches(tmp_path: Path) -> None:
    def layers(**shape: Any) -> tuple[list[tuple[Any, ...]], list[int]]:
        """(query heads, kv heads, head size, window) of each layer, and the first layer with the same keys."""
        found, keys = [], []

        def probe(
            module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
        ) -> tuple[torch.Tensor, None]:
            found.append((query.shape[1], key.shape[1], key.shape[3], options["sliding_window"]))
            keys.append(key)  # Held, so that no address is used twice.
            return dense_attention(module, query, key, value, mask, **options)

        with torch.no_grad():
            load(write_checkpoint(tmp_path, architecture="gemma4", sliding_window=40, **shape), probe)(PROMPT)
        addresses = [key.data_ptr() for key in keys]
        return found, [addresses.index(address) for address in addresses]

    assert layers(num_kv_heads=4, num_global_kv_heads=1) == ([(4, 4, 32, 40), (4, 1, 64, None)], [0, 1])
    found, owners = layers(global_head_dim=48, num_layers=6, num_kv_shared_layers=3)
    assert found == [(4, 2, 32, 40), (4, 2, 48, None)] * 3
    assert owners == [0, 1, 2, 1, 2, 1]


@pytest.mark.parametrize("architecture", ["gemma2", "gemma4"])
def test_a_token_does_not_follow_itself_where_the_output_is_tied(tmp_path: Path, architecture: Any) -> None:
    folder = write_checkpoint(tmp_path, architecture=architecture, hidden_size=1024, sliding_window=40, soft_cap=5.0)
    with torch.no_grad():
        tokens = AutoModelForCausalLM.from_pretrained(folder)(PROMPT).logits.argmax(-1)
    assert (tokens == PROMPT).float().mean() < 0.2


def test_dropped_sinks_change_most_tokens(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path, architecture="gpt_oss", sliding_window=40))
    with torch.no_grad():
        tokens = model(PROMPT).logits[0].argmax(-1)
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
        without = model(PROMPT).logits[0].argmax(-1)
    assert (tokens != without).float().mean() > 0.5


def test_the_seed_decides_every_byte(tmp_path: Path) -> None:
    def files(name: str, seed: int) -> dict[str, bytes]:
        folder = write_checkpoint(tmp_path / name, seed=seed)
        return {file.name: file.read_bytes() for file in folder.iterdir()}

    first, again, other = files("a", 1), files("b", 1), files("c", 2)
    assert first == again
    assert [name for name in first if first[name] != other[name]] == ["model.safetensors"]


@pytest.mark.parametrize("alphabet", [PRINTABLE, string.ascii_lowercase])
def test_greedy_text_is_of_the_alphabet(tmp_path: Path, alphabet: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path, alphabet=alphabet))
    tokens = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=32, do_sample=False)
    generated = tokens[0, PROMPT.shape[1] :].tolist()
    assert len(generated) == 32
    assert set(map(chr, generated)) <= set(alphabet)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(write_checkpoint(tmp_path_factory.mktemp("model")))


@given(text=st.text())
def test_a_token_is_a_byte(tokenizer: Any, text: str) -> None:
    tokens = tokenizer(text)["input_ids"]
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text


def test_special_tokens_follow_the_bytes(tokenizer: Any) -> None:
    assert tokenizer.eos_token == EOS
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        NUM_BYTES, NUM_BYTES + 1, NUM_BYTES + 2,
    )  # fmt: skip


def test_bad_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="got 4 q heads, 3 kv heads; q heads must be a multiple"):
        write_checkpoint(tmp_path, num_kv_heads=3)
    with pytest.raises(InvalidInputError, match="got 4 q heads, 3 kv heads; q heads must be a multiple"):
        write_checkpoint(tmp_path, architecture="gemma4", num_global_kv_heads=3)
    for layers in ({"num_layers": 3}, {"num_layers": 4, "num_kv_shared_layers": 3}):
        with pytest.raises(InvalidInputError, match="of them without keys and values; an even number, and one layer"):
            write_checkpoint(tmp_path, architecture="gemma4", **layers)
    with pytest.raises(InvalidInputError, match="got gpt2; llama or qwen3"):
        write_checkpoint(tmp_path, architecture="gpt2")  # type: ignore[arg-type]
