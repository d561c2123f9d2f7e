"""The warp of Hopper's prefill that loads V, and clears the rows that no query may see.

It follows the notes that the scheduler leaves (``kernels/prefill_hopper_scheduler.py``). Where the cache holds 8-bit
floats, the converter clears (``kernels/prefill_hopper_fp8.py``).

Legend: S slots of a ring, N keys of a KV tile, D head size.
"""

from typing import Any

import tilelang.language as T

from tl_backend.configs.prefill_hopper import WARP, HopperPrefillConfig
from tl_backend.kernels.hopper import arrive_warp
from tl_backend.kernels.prefill_hopper_load import load_program
from tl_backend.kernels.prefill_hopper_notes import (
    FIRST_HEAD,
    FIRST_KEY,
    FIRST_TILE,
    LAST_PAGE,
    NUM_TILES,
    REQUEST,
    SEQ_LEN,
)
from tl_backend.problem import AttentionProblem


def values_program(problem: AttentionProblem, config: HopperPrefillConfig) -> Any:
    """The macro: all that the warp does until no more items come."""
    block_n, q_stages, head_dim = config.block_n, config.q_stages, problem.head_dim
    page_size, group, window = problem.page_size, problem.group_size, problem.window
    load = load_program(problem, config)
    vectors = head_dim // 8

    @T.macro
    def clear_rows(tile_SND, stage, lane, begin, end):
        for step in T.serial(T.ceildiv((end - begin) * vectors, WARP)):
            if step * WARP + lane < (end - begin) * vectors:
                for element in T.vectorized(8):
                    tile_SND[
                        stage,
                        begin + (step * WARP + lane) // vectors,
                        (step * WARP + lane) % vectors * 8 + element,
                    ] = 0

    @T.macro
    def load_values(
        v_lane, notes, KV, num_blocks, strides, block_table, tile_SND, q_ready, q_free, v_ready, v_free, v_there
    ):  # fmt: skip
        # tile_SND, v_ready, v_free: of the ring that tiles land in. v_there: a tile that has rows to clear has landed.
        v_done = T.alloc_var("int32", init=0)  # KV tiles.
        v_turn = T.alloc_var("int32", init=0)
        v_slot_q = T.alloc_var("int32", init=0)
        v_request = T.alloc_var("int32")
        v_first_key = T.alloc_var("int32")
        v_seq_len = T.alloc_var("int32")
        v_last_page = T.alloc_var("int32")
        v_head = T.alloc_var("int32")
        v_begin = T.alloc_var("int32")
        v_page = T.alloc_var("int32", init=0)
        v_tiles = T.alloc_var("int32", init=1)
        v_key0 = T.alloc_var("int32")
        cleared = T.alloc_var("int32", init=0)  # Tiles that had rows to clear.
        while v_tiles > 0:
            v_slot_q = v_turn % q_stages
            T.mbarrier_wait_parity(q_ready[v_slot_q], v_turn // q_stages % 2)
            v_tiles = notes[v_slot_q, NUM_TILES]
            if v_tiles > 0:
                v_begin = notes[v_slot_q, FIRST_TILE]
                v_request = notes[v_slot_q, REQUEST]
                v_head = notes[v_slot_q, FIRST_HEAD] // group
                v_first_key = notes[v_slot_q, FIRST_KEY]
                v_seq_len = notes[v_slot_q, SEQ_LEN]
                v_last_page = notes[v_slot_q, LAST_PAGE]
                arrive_warp(q_free, v_slot_q)
                for tile in T.serial(v_tiles):
                    v_key0 = (v_begin + tile) * block_n
                    if v_lane < load.copies:
                        v_page = block_table[
                            v_request, load.page_column(v_key0, v_lane, v_first_key // page_size, v_last_page)
                        ]
                    T.mbarrier_wait_parity(
                        v_free[(v_done + tile) % load.stages], (v_done + tile) // load.stages % 2 ^ 1
                    )
                    if problem.is_quantized:
                        load.load_tile(
                            KV, num_blocks, strides, tile_SND, (v_done + tile) % load.stages,
                            v_ready, (v_done + tile) % load.stages, v_lane, head_dim, v_key0, v_head, v_page,
                        )  # fmt: skip
                    elif v_key0 + block_n <= v_seq_len and v_key0 >= v_first_key:
                        load.load_tile(
                            KV, num_blocks, strides, tile_SND, (v_done + tile) % load.stages,
                            v_ready, (v_done + tile) % load.stages, v_lane, head_dim, v_key0, v_head, v_page,
                        )  # fmt: skip
                    else:
                        # Values outside the sequence or the window may be NaN, which a weight of 0 would keep.
                        load.load_tile(
                            KV, num_blocks, strides, tile_SND, (v_done + tile) % load.stages,
                            v_there, 0, v_lane, head_dim, v_key0, v_head, v_page,
                        )  # fmt: skip
                        T.mbarrier_wait_parity(v_there[0], cleared % 2)
                        cleared = cleared + 1
                        clear_rows(
                            tile_SND, (v_done + tile) % load.stages, v_lane,
                            T.max(T.min(v_seq_len - v_key0, block_n), 0), block_n,
                        )  # fmt: skip
                        if window is not None:
                            clear_rows(
                                tile_SND, (v_done + tile) % load.stages, v_lane,
                                0, T.min(T.max(v_first_key - v_key0, 0), block_n),
                            )  # fmt: skip
                        T.fence_proxy_async()
                        arrive_warp(v_ready, (v_done + tile) % load.stages)
                v_done = v_done + v_tiles
                v_turn = v_turn + 1

    return load_values
