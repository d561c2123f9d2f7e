"""Config of the cache write."""

from __future__ import annotations

from dataclasses import dataclass

from tl_backend.problem import AttentionProblem


@dataclass(frozen=True, kw_only=True)
class CacheWriteConfig:
    """Attributes: tokens_per_block: tokens whose keys and values one block copies; threads: of a block."""

    tokens_per_block: int
    threads: int


def default_cache_write_config(problem: AttentionProblem) -> CacheWriteConfig:
    """Four 16-byte vectors a thread and tensor, as far as one token's heads fill a block; a copy needs no more."""
    vectors_per_token = problem.num_kv_heads * problem.head_dim // 8
    return CacheWriteConfig(tokens_per_block=max(1, min(16, 4 * 128 // vectors_per_token)), threads=128)
