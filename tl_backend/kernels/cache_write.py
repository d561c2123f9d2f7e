"""Write new keys and values to their slots in the paged cache.

Legend: n tokens, HK kv heads, D head size.
"""

from typing import Any

import tilelang.language as T

from tl_backend.configs.cache_write import CacheWriteConfig
from tl_backend.kernels.dialect import Dialect, vector
from tl_backend.kernels.fp8 import FORMATS
from tl_backend.problem import AttentionProblem


def cache_write(problem: AttentionProblem, config: CacheWriteConfig, dialect: Dialect) -> Any:
    """The prim_func. Key and value ``[n, HK, D]``, slot_mapping int64 ``[n]``; a slot outside the cache is skipped.

    An 8-bit cache holds elements divided by k_scale and v_scale, float32 ``[1]``.
    """
    tokens, head_dim, num_kv_heads = config.tokens_per_block, problem.head_dim, problem.num_kv_heads
    page_size, dtype, float8 = problem.page_size, problem.dtype, FORMATS.get(problem.kv_dtype)

    def stored(element, scale):
        return element if float8 is None else float8.encode(T.cast(element, "float32") / scale[0])

    @T.prim_func
    def cache_write_kernel(
        key_ptr: T.ptr,
        value_ptr: T.ptr,
        kv_ptr: T.ptr,
        slot_mapping_ptr: T.ptr,
        k_scale_ptr: T.ptr,
        v_scale_ptr: T.ptr,
        num_tokens: T.int32,
        num_slots: T.int64,
        key_stride_t: T.int64,
        key_stride_h: T.int64,
        value_stride_t: T.int64,
        value_stride_h: T.int64,
        kv_stride_b: T.int64,
        kv_stride_h: T.int64,
        kv_stride_s: T.int64,
    ):
        K = dialect.tensor(key_ptr, [num_kv_heads, head_dim], dtype, [key_stride_t, key_stride_h])
        V = dialect.tensor(value_ptr, [num_kv_heads, head_dim], dtype, [value_stride_t, value_stride_h])
        KV = dialect.kv_cache(kv_ptr, problem, [kv_stride_b, kv_stride_h, kv_stride_s])
        slot_mapping = vector(slot_mapping_ptr, "int64")
        k_scale = vector(k_scale_ptr, "float32")
        v_scale = vector(v_scale_ptr, "float32")
        with dialect.launch(T.ceildiv(num_tokens, tokens), config.threads) as block:
            for i, h, d in dialect.parallel(tokens, num_kv_heads, head_dim):
                if block * tokens + i < num_tokens:
                    if slot_mapping[block * tokens + i] >= 0 and slot_mapping[block * tokens + i] < num_slots:
                        slot = slot_mapping[block * tokens + i]
                        key = K[block * tokens + i, h, d]
                        value = V[block * tokens + i, h, d]
                        KV[slot // page_size, h, slot % page_size, d] = stored(key, k_scale)
                        KV[slot // page_size, h, slot % page_size, head_dim + d] = stored(value, v_scale)

    return cache_write_kernel
