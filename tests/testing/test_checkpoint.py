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

from tests.testing.scores import attention_scores
from tl_backend.errors import InvalidInputError
from tl_backend.testing.checkpoint import EOS, NUM_BYTES, PRINTABLE, write_llama

PROMPT = torch.tensor([list(b"The scores of this prompt are measured, layer by layer, head by head.")])
SHAPES: list[dict[str, Any]] = [
    {},
    {"architecture": "qwen3"},
    {"num_layers": 3, "num_q_heads": 7, "num_kv_heads": 1, "head_dim": 48},
    {"architecture": "qwen3", "num_q_heads": 6, "num_kv_heads": 3, "head_dim": 80, "hidden_size": 192},
]
IDS = ["llama", "qwen3", "llama-gqa7-d48", "qwen3-d80"]


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_transformers_loads_every_tensor(tmp_path: Path, shape: dict[str, Any]) -> None:
    _, report = AutoModelForCausalLM.from_pretrained(write_llama(tmp_path, **shape), output_loading_info=True)
    assert {name: list(found) for name, found in report.items() if found} == {}


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
@pytest.mark.parametrize("qk_gain", [1.5, 4.0])
def test_scores_have_the_deviation_asked_for(tmp_path: Path, shape: dict[str, Any], qk_gain: float) -> None:
    for layer, scores in enumerate(attention_scores(write_llama(tmp_path, qk_gain=qk_gain, **shape), PROMPT)):
        deviation = scores.std().item()
        assert 0.75 * qk_gain < deviation < 1.35 * qk_gain, f"layer {layer}: {deviation} for {qk_gain}"
        assert deviation >= 1


def test_the_seed_decides_every_byte(tmp_path: Path) -> None:
    def files(name: str, seed: int) -> dict[str, bytes]:
        folder = write_llama(tmp_path / name, seed=seed)
        return {file.name: file.read_bytes() for file in folder.iterdir()}

    first, again, other = files("a", 1), files("b", 1), files("c", 2)
    assert first == again
    assert [name for name in first if first[name] != other[name]] == ["model.safetensors"]


@pytest.mark.parametrize("alphabet", [PRINTABLE, string.ascii_lowercase])
def test_greedy_text_is_of_the_alphabet(tmp_path: Path, alphabet: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_llama(tmp_path, alphabet=alphabet))
    tokens = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=32, do_sample=False)
    generated = tokens[0, PROMPT.shape[1] :].tolist()
    assert len(generated) == 32
    assert set(map(chr, generated)) <= set(alphabet)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(write_llama(tmp_path_factory.mktemp("model")))


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
        write_llama(tmp_path, num_kv_heads=3)
    with pytest.raises(InvalidInputError, match="got gpt2; llama or qwen3"):
        write_llama(tmp_path, architecture="gpt2")  # type: ignore[arg-type]
