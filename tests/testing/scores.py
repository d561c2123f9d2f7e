"""A look into transformers' attention: its scores, and attention that is wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

Attention = Callable[..., tuple[torch.Tensor, None]]


def dense_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention of ``[B, H, T, D]`` queries, as an attention function of transformers: ``[B, T, H, D]``."""
    weights = scores_of(query, key, scaling).softmax(-1)
    return (weights @ expand(value, query)).transpose(1, 2), None


def scores_of(query: torch.Tensor, key: torch.Tensor, scaling: float, offset: int = 0) -> torch.Tensor:
    """Scaled scores, with keys later than ``offset`` past the query's position at minus infinity."""
    num_rows, num_keys = query.shape[2], key.shape[2]
    position = num_keys - num_rows + torch.arange(num_rows)[:, None] + offset
    hidden = torch.arange(num_keys)[None, :] > position.clamp(min=0)
    return (query @ expand(key, query).transpose(-1, -2) * scaling).masked_fill(hidden, -torch.inf)


def expand(heads: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1)


def load(model: Path, attention: Attention) -> Any:
    """The model in float32 with ``attention`` in every layer."""
    AttentionInterface.register("probe", attention)
    return AutoModelForCausalLM.from_pretrained(model, attn_implementation="probe")


def attention_scores(model: Path, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The scores that each layer's causal mask leaves, flat, for one prompt ``[1, T]``."""
    found = []

    def probe(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[torch.Tensor, None]:
        scores = scores_of(query, key, options["scaling"])
        found.append(scores[scores > -torch.inf])
        return dense_attention(module, query, key, value, mask, **options)

    with torch.no_grad():
        load(model, probe)(tokens)
    return found
