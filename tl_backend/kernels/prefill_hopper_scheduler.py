"""The warp of Hopper's prefill that takes items, leaves a note of each, and loads Q and K.

An item is a tile of query tokens of one request, and a lane: the query heads of one kv head that share the tile. Each
block begins with the item of its own number, and takes the next ones by a counter. Its piece of the KV tiles, and which
keys are visible, are worked out here. Who reads the notes (``kernels/prefill_hopper_notes.py``): the warp that loads V
(``kernels/prefill_hopper_values.py``), the converter of 8-bit caches (``kernels/prefill_hopper_fp8.py``) and the
consumers (``kernels/prefill_hopper_consumer.py``).

Legend: S slots of a ring, M rows of a tile, N keys of a KV tile, D head size.
"""

from typing import Any

import tilelang.language as T

from tl_backend.configs.prefill_hopper import PIECE_BITS, WARPGROUP_ROWS, HopperPrefillConfig, swizzled_columns
from tl_backend.configs.tile import ELEMENT_BYTES
from tl_backend.kernels.hopper import heads_box
from tl_backend.kernels.prefill_hopper_load import load_program
from tl_backend.kernels.prefill_hopper_notes import (
    FIRST_HEAD,
    FIRST_KEY,
    FIRST_LIMIT,
    FIRST_ROW,
    FIRST_TILE,
    LAST_PAGE,
    NUM_TILES,
    NUM_TOKENS,
    PIECE,
    PIECES,
    REQUEST,
    SEQ_LEN,
    SLOT,
)
from tl_backend.problem import AttentionProblem

# Below every limit that a tile of keys is compared with: nothing is visible.
NOWHERE = -(2**30)


def lanes_of(problem: AttentionProblem, config: HopperPrefillConfig) -> int:
    """Items of one tile of query tokens."""
    return problem.num_kv_heads * config.head_tiles(problem)


def scheduler_program(problem: AttentionProblem, config: HopperPrefillConfig) -> Any:
    """The macro: all that the warp does until no more items come."""
    block_n, q_stages, heads, tokens = config.block_n, config.q_stages, config.heads_per_tile, config.tokens_per_tile
    tokens_each, lanes = config.tokens_per_warpgroup, lanes_of(problem, config)
    dtype, head_dim, page_size = problem.dtype, problem.head_dim, problem.page_size
    num_heads, group, window, causal = problem.num_q_heads, problem.group_size, problem.window, problem.causal
    columns = swizzled_columns(head_dim)
    num_columns = head_dim // columns
    load = load_program(problem, config)

    def first_visible(first_limit):
        """The first key that some query of the tile sees."""
        return T.max(first_limit - (window - 1), 0) if window is not None else 0

    @T.macro
    def schedule(
        lane, block, blocks, notes, Q, num_rows, q_strides, KV, num_blocks, kv_strides, block_table, max_blocks,
        cu_seqlens_q, seq_lens, work, num_work, counter, q_SMD, tile_SND, q_ready, q_free, k_ready, k_free,
    ):  # fmt: skip
        # tile_SND, k_ready, k_free: of the ring that tiles of K land in.
        done = T.alloc_var("int32", init=0)  # KV tiles.
        turn = T.alloc_var("int32", init=0)
        slot_q = T.alloc_var("int32", init=0)
        item = T.alloc_var("int32", init=0)
        request = T.alloc_var("int32")
        token0 = T.alloc_var("int32")
        first_head = T.alloc_var("int32")
        query_len = T.alloc_var("int32")
        seq_len = T.alloc_var("int32")
        limit = T.alloc_var("int32")
        begin = T.alloc_var("int32")
        end = T.alloc_var("int32")
        tiles = T.alloc_var("int32")
        piece = T.alloc_var("int32")
        pieces = T.alloc_var("int32")
        first_page = T.alloc_var("int32")
        last_page = T.alloc_var("int32")
        page = T.alloc_var("int32", init=0)
        at_work = T.alloc_var("int32", init=1)
        item = block
        while at_work > 0:
            slot_q = turn % q_stages
            T.mbarrier_wait_parity(q_free[slot_q], turn // q_stages % 2 ^ 1)
            if item < num_work * lanes:
                request = work[item // lanes * 4]
                token0 = work[item // lanes * 4 + 1]
                piece = work[item // lanes * 4 + 2] % (1 << PIECE_BITS)
                pieces = work[item // lanes * 4 + 2] // (1 << PIECE_BITS)
                first_head = (item % lanes) * heads
                query_len = cu_seqlens_q[request + 1] - cu_seqlens_q[request]
                # vLLM's dummy runs ask for longer sequences than their block table holds.
                seq_len = T.min(seq_lens[request], max_blocks * page_size)
                if causal:
                    limit = seq_len - query_len + token0
                    end = T.min(limit + tokens, seq_len)
                else:
                    limit = seq_len - 1
                    end = seq_len
                begin = first_visible(limit) // block_n
                tiles = T.max(T.ceildiv(end, block_n) - begin, 0)
                end = begin + tiles * (piece + 1) // pieces
                begin = begin + tiles * piece // pieces
                tiles = end - begin
                first_page = first_visible(limit) // page_size
                last_page = T.max((seq_len - 1) // page_size, 0)
                if tiles < 1:
                    # A piece or a sequence without keys: one tile that nobody sees.
                    tiles = 1
                    limit = NOWHERE
                if lane == 0:
                    notes[slot_q, NUM_TILES] = tiles
                    notes[slot_q, FIRST_TILE] = begin
                    notes[slot_q, FIRST_LIMIT] = limit
                    notes[slot_q, FIRST_ROW] = cu_seqlens_q[request] + token0
                    notes[slot_q, NUM_TOKENS] = query_len - token0
                    notes[slot_q, FIRST_HEAD] = first_head
                    notes[slot_q, REQUEST] = request
                    notes[slot_q, FIRST_KEY] = first_visible(limit)
                    notes[slot_q, SEQ_LEN] = seq_len
                    notes[slot_q, LAST_PAGE] = last_page
                    notes[slot_q, PIECE] = piece
                    notes[slot_q, PIECES] = pieces
                    notes[slot_q, SLOT] = work[item // lanes * 4 + 3]
                    T.mbarrier_arrive_expect_tx(q_ready[slot_q], tokens * heads * head_dim * ELEMENT_BYTES[dtype])
                T.sync_warp()
                if lane < config.warpgroups * num_columns:
                    T.tma_load(
                        heads_box(Q, dtype, head_dim, num_heads, num_rows, q_strides, heads, tokens_each),
                        q_ready[slot_q],
                        T.access_ptr(
                            q_SMD[slot_q, lane // num_columns * WARPGROUP_ROWS, lane % num_columns * columns], "w"
                        ),
                        lane % num_columns * columns,
                        first_head,
                        cu_seqlens_q[request] + token0 + lane // num_columns * tokens_each,
                        0,
                    )
                for tile in T.serial(tiles):
                    if lane < load.copies:
                        page = block_table[
                            request, load.page_column((begin + tile) * block_n, lane, first_page, last_page)
                        ]
                    T.mbarrier_wait_parity(k_free[(done + tile) % load.stages], (done + tile) // load.stages % 2 ^ 1)
                    load.load_tile(
                        KV, num_blocks, kv_strides, tile_SND, (done + tile) % load.stages,
                        k_ready, (done + tile) % load.stages,
                        lane, 0, (begin + tile) * block_n, first_head // group, page,
                    )  # fmt: skip
                done = done + tiles
                turn = turn + 1
                if lane == 0:
                    item = T.atomic_add(counter[0], 1, return_prev=True)
                    # As many items are taken here as there are.
                    if item == num_work * lanes - 1:
                        counter[0] = 0
                    item = item + blocks
                item = T.shfl_sync(item, 0)
            else:
                at_work = 0
                if lane == 0:
                    notes[slot_q, NUM_TILES] = 0
                    T.mbarrier_arrive(q_ready[slot_q])

    return schedule
