"""What Hopper's prefill does for 8-bit caches: tiles land as they are stored, and a converter makes 16 bits of them.

The converter is a warpgroup of its own, or two warps that the producer has left. What WGMMA reads is what a cache of 16
bits has: keys of the queries' type, values of float16, which holds every 8-bit float exactly and is the cheapest to
make: one instruction for two elements, where bfloat16 takes four. The weights that meet the values are float16, too:
none is above 2^8. Who fetches the tiles is in ``kernels/prefill_hopper_scheduler.py`` and
``kernels/prefill_hopper_values.py``, who reads what is made of them in ``kernels/prefill_hopper_consumer.py``.

Legend: S slots of a ring, N keys of a KV tile, D head size.
"""

from typing import Any

import tilelang.language as T

from tl_backend.configs.prefill_hopper import (
    NARROW_BYTES,
    WARP,
    HopperPrefillConfig,
    converted_keys,
)
from tl_backend.kernels.hopper import arrive_warp
from tl_backend.kernels.prefill_hopper_notes import FIRST_KEY, FIRST_TILE, NUM_TILES, SEQ_LEN
from tl_backend.problem import AttentionProblem

VALUE_DTYPE = "float16"
# Vectors that a thread reads before it writes the first: their latencies overlap, and 40 registers hold them.
BATCH = 4

# TileLang's own casts to bfloat16 go through cvt.rn.bf16.f16, which becomes F2F: not one of the instructions that the
# arithmetic units do, and exponentials are what the softmax next door is short of. What it would cost is not measured.
HELPERS = """
template <bool to_bfloat16>
__device__ __forceinline__ unsigned int from_halves(unsigned int halves) {
  if constexpr (to_bfloat16) {
    unsigned int wide;
    asm("{.reg .b16 a, b; .reg .f32 c, d; mov.b32 {a, b}, %1; cvt.f32.f16 c, a; cvt.f32.f16 d, b;"
        " cvt.rn.bf16x2.f32 %0, d, c;}" : "=r"(wide) : "r"(halves));
    return wide;
  }
  return halves;
}
template <bool is_e5m2>
__device__ __forceinline__ void to_halves(unsigned int narrow, unsigned int &low, unsigned int &high) {
  if constexpr (is_e5m2) {  // The upper half of a float16.
    low = __byte_perm(narrow, 0, 0x1404);
    high = __byte_perm(narrow, 0, 0x3424);
  } else {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
        : "=r"(low), "=r"(high) : "r"(narrow));
  }
}
// Eight elements, or zeros.
template <bool is_e5m2, bool to_bfloat16>
__device__ __forceinline__ void widen(void *wide, const void *narrow, bool is_kept) {
  uint2 from = *(const uint2 *)narrow;
  uint4 to;
  from.x = is_kept ? from.x : 0;
  from.y = is_kept ? from.y : 0;
  to_halves<is_e5m2>(from.x, to.x, to.y);
  to_halves<is_e5m2>(from.y, to.z, to.w);
  to.x = from_halves<to_bfloat16>(to.x);
  to.y = from_halves<to_bfloat16>(to.y);
  to.z = from_halves<to_bfloat16>(to.z);
  to.w = from_halves<to_bfloat16>(to.w);
  *(uint4 *)wide = to;
}
"""


def converter_program(problem: AttentionProblem, config: HopperPrefillConfig) -> Any:
    """The macro: all that the converter does until no more items come."""
    block_n, head_dim = config.block_n, problem.head_dim
    num_stages, narrow_stages, q_stages = config.num_stages, config.narrow_stages, config.q_stages
    rows = converted_keys(head_dim, config.converter_warps)
    across = WARP * config.converter_warps // rows  # Vectors side by side.
    columns = head_dim // (across * NARROW_BYTES)
    vectors = block_n // rows * columns  # Of a thread and tile.
    batch = max(count for count in range(1, BATCH + 1) if vectors % count == 0)

    @T.macro
    def widen_tile(narrow_SND, narrow_stage, wide_SND, stage, thread, dtype, is_whole, begin, end):
        # The vector's row, and its first column.
        narrow = T.alloc_local([batch, NARROW_BYTES], "uint8")
        wide = T.alloc_local([batch, NARROW_BYTES], dtype)
        for n in T.unroll(vectors // batch):
            for i in T.unroll(batch):
                for e in T.vectorized(NARROW_BYTES):
                    narrow[i, e] = narrow_SND[
                        narrow_stage,
                        (n * batch + i) // columns * rows + thread // across,
                        ((n * batch + i) % columns * across + thread % across) * NARROW_BYTES + e,
                    ]
            for i in T.unroll(batch):
                T.call_extern(
                    "handle",
                    f"widen<{str(problem.kv_dtype == 'float8_e5m2').lower()}, {str(dtype == 'bfloat16').lower()}>",
                    T.address_of(wide[i, 0]),
                    T.address_of(narrow[i, 0]),
                    True
                    if is_whole
                    else T.And(
                        (n * batch + i) // columns * rows + thread // across >= begin,
                        (n * batch + i) // columns * rows + thread // across < end,
                    ),
                )
                for e in T.vectorized(NARROW_BYTES):
                    wide_SND[
                        stage,
                        (n * batch + i) // columns * rows + thread // across,
                        ((n * batch + i) % columns * across + thread % across) * NARROW_BYTES + e,
                    ] = wide[i, e]

    @T.macro
    def convert_keys(
        index, thread, narrow_k_SND, k_SND, k_landed, k_taken, k_ready, k_free
    ):  # fmt: skip
        T.mbarrier_wait_parity(k_landed[index % narrow_stages], index // narrow_stages % 2)
        T.mbarrier_wait_parity(k_free[index % num_stages], index // num_stages % 2 ^ 1)
        widen_tile(
            narrow_k_SND, index % narrow_stages, k_SND, index % num_stages, thread, problem.dtype, True, 0, block_n
        )
        T.fence_proxy_async()
        arrive_warp(k_ready, index % num_stages)
        arrive_warp(k_taken, index % narrow_stages)

    @T.macro
    def convert_values(
        index, key0, first_key, seq_len, thread, narrow_v_SND, v_SND, v_landed, v_taken, v_ready, v_free
    ):  # fmt: skip
        T.mbarrier_wait_parity(v_landed[index % narrow_stages], index // narrow_stages % 2)
        T.mbarrier_wait_parity(v_free[index % num_stages], index // num_stages % 2 ^ 1)
        if key0 + block_n <= seq_len and key0 >= first_key:
            widen_tile(
                narrow_v_SND, index % narrow_stages, v_SND, index % num_stages, thread, VALUE_DTYPE, True, 0, block_n
            )
        else:
            # Values outside the sequence or the window may be NaN, which a weight of 0 would keep.
            widen_tile(
                narrow_v_SND, index % narrow_stages, v_SND, index % num_stages, thread, VALUE_DTYPE,
                False, first_key - key0, seq_len - key0,
            )  # fmt: skip
        T.fence_proxy_async()
        arrive_warp(v_ready, index % num_stages)
        arrive_warp(v_taken, index % narrow_stages)

    @T.macro
    def convert(
        thread, notes, narrow_k_SND, narrow_v_SND, k_SND, v_SND, q_ready, q_free,
        k_landed, k_taken, k_ready, k_free, v_landed, v_taken, v_ready, v_free,
    ):  # fmt: skip
        done = T.alloc_var("int32", init=0)  # KV tiles.
        turn = T.alloc_var("int32", init=0)
        slot_q = T.alloc_var("int32", init=0)
        tiles = T.alloc_var("int32", init=1)
        key0 = T.alloc_var("int32")
        first_key = T.alloc_var("int32")
        seq_len = T.alloc_var("int32")
        while tiles > 0:
            slot_q = turn % q_stages
            T.mbarrier_wait_parity(q_ready[slot_q], turn // q_stages % 2)
            tiles = notes[slot_q, NUM_TILES]
            if tiles > 0:
                key0 = notes[slot_q, FIRST_TILE] * block_n
                first_key = notes[slot_q, FIRST_KEY]
                seq_len = notes[slot_q, SEQ_LEN]
                arrive_warp(q_free, slot_q)
                # In the order in which consumers need them: keys are a tile ahead of values.
                for tile in T.serial(tiles + 1):
                    if tile < tiles:
                        convert_keys(done + tile, thread, narrow_k_SND, k_SND, k_landed, k_taken, k_ready, k_free)
                    if tile > 0:
                        convert_values(
                            done + tile - 1, key0 + (tile - 1) * block_n, first_key, seq_len, thread,
                            narrow_v_SND, v_SND, v_landed, v_taken, v_ready, v_free,
                        )  # fmt: skip
                done = done + tiles
                turn = turn + 1

    return convert
