"""The poison harness for the cache write.

Legend: HK kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tl_backend.ops import paged_cache_write
from tl_backend.ops.reference import paged_cache_write_reference
from tl_backend.problem import AttentionProblem
from tl_backend.testing.poison_judge import BITS, PoisonError, num_different
from tl_backend.testing.views import KVLayout, kv_pool, odd_strides


def check_cache_write(
    problem: AttentionProblem,
    slots: list[int],
    device: torch.device,
    *,
    kv_layout: KVLayout = "HND",
    num_blocks: int = 5,
    operation: Callable[..., Any] = paged_cache_write,
    seed: int = 0,
) -> None:
    """Write tokens to ``slots`` of a pool of random bits (NaN and infinity among them) and compare every bit of it.

    Keys and values are slices of one fused buffer (P5) with more rows than slots; slots outside the pool must be
    skipped.

    Raises:
        PoisonError: a bit differs from the reference's.
    """
    dtype = getattr(torch, problem.dtype)
    heads, head_dim = problem.num_kv_heads, problem.head_dim
    scales = {"k_scale": torch.full((1,), 0.04, device=device), "v_scale": torch.full((1,), 3.0, device=device)}
    scales = scales if problem.is_quantized else {}
    generator = torch.Generator(device).manual_seed(seed)
    store, kv_cache = kv_pool(problem, num_blocks, kv_layout, getattr(torch, problem.kv_dtype), device)
    bits = store.view(BITS[store.element_size()])
    bits.random_(generator=generator)
    wanted = store.clone()
    qkv = torch.randn(len(slots) + 3, (2 + 2 * heads) * head_dim, generator=generator, device=device).to(dtype)
    key, value = (part.unflatten(-1, (heads, head_dim)) for part in qkv[:, 2 * head_dim :].chunk(2, dim=-1))
    capacity = num_blocks * kv_cache.shape[2]
    legal = torch.tensor([slot if 0 <= slot < capacity else -1 for slot in slots])
    paged_cache_write_reference(key, value, _same_view(kv_cache, wanted), legal, **scales)
    for _ in range(2):
        mapping = torch.tensor(slots, dtype=torch.int64, device=device)
        operation(odd_strides(key), odd_strides(value), kv_cache, mapping, **scales)
        if (changed := num_different(store, wanted)) > 0:
            raise PoisonError(
                f"P4: {changed} of {store.numel()} elements of the pool and its canaries differ from the "
                f"reference's; the limit is 0. Slots {slots[:8]}, {kv_layout}, {problem}"
            )


def _same_view(view: torch.Tensor, store: torch.Tensor) -> torch.Tensor:
    """The part of ``store`` that ``view`` is of the allocation it was taken from."""
    return store.as_strided(view.shape, view.stride(), view.storage_offset())
