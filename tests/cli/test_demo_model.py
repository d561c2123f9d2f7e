"""The demo's model can tell right kernels from wrong ones, and nothing else can change its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.testing.scores import Attention, attention_scores, dense_attention, expand, load, scores_of
from tl_backend.cli.demo import MODEL, NUM_TOKENS, PROMPT
from tl_backend.testing.checkpoint import write_checkpoint

PROMPT_TOKENS = torch.tensor([list(PROMPT.encode())])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), **MODEL)


@torch.no_grad()
def greedy(
    model: Path, attention: Attention = dense_attention, dtype: torch.dtype = torch.float32
) -> tuple[str, float]:
    """The greedy text, and the least gap between the best two logits of a step."""
    network = load(model, attention).to(dtype)
    text, gap, tokens, past = "", torch.inf, PROMPT_TOKENS, None
    for _ in range(NUM_TOKENS):
        step = network(tokens, past_key_values=past, use_cache=True)
        best, second = step.logits[0, -1].float().topk(2).values.tolist()
        tokens, past, gap = step.logits[:, -1:].argmax(-1), step.past_key_values, min(gap, best - second)
        text += chr(int(tokens))
    return text, gap


def wrong_scale(module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: float, **rest: Any) -> Any:
    return dense_attention(module, query, key, value, mask, scaling=1.1 * scaling)


def permuted_heads(module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: float, **rest: Any) -> Any:
    return dense_attention(module, query.roll(1, dims=1), key, value, mask, scaling=scaling)


def mask_off_by_one(module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: float, **rest: Any) -> Any:
    weights = scores_of(query, key, scaling, offset=-1).softmax(-1)
    return (weights @ expand(value, query)).transpose(1, 2), None


def test_scores_deviate_by_more_than_one(model: Path) -> None:
    for scores in attention_scores(model, PROMPT_TOKENS):
        assert scores.std().item() >= 1


def test_no_step_is_a_near_tie_and_the_text_is_no_loop(model: Path) -> None:
    text, gap = greedy(model)
    assert gap > 0.1
    assert len(set(text)) >= 10


def test_float16_gives_the_same_text(model: Path) -> None:
    # The GPU's demo serves float16.
    assert greedy(model, dtype=torch.float16)[0] == greedy(model)[0]


@pytest.mark.parametrize("fault", [wrong_scale, permuted_heads, mask_off_by_one])
def test_planted_faults_change_the_text(model: Path, fault: Attention) -> None:
    assert greedy(model, fault)[0] != greedy(model)[0]


def test_the_prompt_crosses_a_page_and_the_answer_another(model: Path) -> None:
    page = 128
    assert page < len(PROMPT) < 2 * page < len(PROMPT) + NUM_TOKENS
