"""The cache write's block."""

from __future__ import annotations

import pytest

from tl_backend.configs.cache_write import default_cache_write_config
from tl_backend.problem import SUPPORTED_HEAD_DIMS
from tl_backend.testing.cases import make_problem


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8, 32, 128])
def test_a_block_copies_a_token_or_more(num_kv_heads: int) -> None:
    for head_dim in SUPPORTED_HEAD_DIMS:
        config = default_cache_write_config(make_problem(num_kv_heads, num_kv_heads, head_dim, 16))
        assert 1 <= config.tokens_per_block <= 16
        vectors = config.tokens_per_block * num_kv_heads * head_dim // 8
        assert config.tokens_per_block == 1 or vectors <= 4 * config.threads
