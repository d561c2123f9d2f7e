"""Varlen prefill over a paged cache for Hopper: warp-specialised, on persistent blocks.

One block a multiprocessor takes items (a tile of query tokens of one request, and a lane: the query heads of one kv
head that share the tile) until none is left. One warp of the producer takes the items and loads Q and K, one loads V,
all by TMA; consumers of 64 rows each compute (``kernels/prefill_hopper_rows.py``). Where the cache holds 8-bit floats,
a converter stands between the two (``kernels/prefill_hopper_fp8.py``).

Legend: T query rows, H query heads, HK kv heads, D head size, R requests, W work items.
"""

from typing import Any

import tilelang
import tilelang.language as T

from tl_backend.configs.prefill_hopper import (
    NOTE_NUMBERS,
    PIECE_BITS,
    WARP,
    WARPGROUP,
    HopperPrefillConfig,
    swizzled_columns,
)
from tl_backend.configs.tile import ELEMENT_BYTES
from tl_backend.kernels.dialect import Dialect, rows, vector
from tl_backend.kernels.hopper import arrive_warp, heads_box, pages_box
from tl_backend.kernels.prefill_hopper_fp8 import HELPERS, VALUE_DTYPE, converter_program
from tl_backend.kernels.prefill_hopper_rows import consumer_program
from tl_backend.kernels.prefill_notes import (
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
from tl_backend.kernels.tile import ACCUM
from tl_backend.problem import AttentionProblem

# Below every limit that a tile of keys is compared with: nothing is visible.
NOWHERE = -(2**30)


def prefill_hopper(problem: AttentionProblem, config: HopperPrefillConfig, dialect: Dialect) -> Any:
    """The prim_func.

    Q ``[T, H, D]``, KV the cache ``[num_blocks, HK, page, 2 * D]``, O ``[T, H, D]``, block_table int32
    ``[R, max_blocks]``, cu_seqlens_q int32 ``[R + 1]``, seq_lens int32 ``[R]``, work int32 ``[W, 4]`` of (request,
    first token, piece | pieces << 16, slot), longest first. Where the problem has them: lse float32 ``[H, T]`` (natural
    log), sinks float32 ``[H]``, k_scale and v_scale float32 ``[1]``. counter int32 ``[1]``: zero, before and after.

    Pieces of a tile that is split write float32 partial_o ``[>= slot + tokens * pieces, H, D]`` and partial_lse (base
    2), at rows slot + token * pieces + piece, for a combine.
    """
    block_n, num_stages, q_stages = config.block_n, config.num_stages, config.q_stages
    dtype, head_dim, page_size = problem.dtype, problem.head_dim, problem.page_size
    num_heads, num_kv_heads, group = problem.num_q_heads, problem.num_kv_heads, problem.group_size
    heads, tokens, block_m = config.heads_per_tile, config.tokens_per_tile, config.block_m
    tokens_each = config.tokens_per_warpgroup
    lanes = num_kv_heads * config.head_tiles(problem)
    window, causal = problem.window, problem.causal
    columns = swizzled_columns(head_dim)
    num_columns = head_dim // columns
    box_rows, copies = config.box_rows(problem), config.copies(problem)
    consumers = WARPGROUP * config.warpgroups
    consumer_warps = 4 * config.warpgroups
    producer_registers = config.role_registers[1]
    sinks_dtype = problem.sinks_dtype or ACCUM
    quantized, converter_warps = problem.is_quantized, config.converter_warps
    consume = consumer_program(problem, config)
    convert = converter_program(problem, config) if quantized else None
    # Of the tiles as TMA fetches them.
    stored_dtype, stored_bytes = ("uint8", 1) if quantized else (dtype, ELEMENT_BYTES[dtype])
    stored_columns, stored_stages = (head_dim, config.narrow_stages) if quantized else (columns, num_stages)
    stored_across = head_dim // stored_columns
    first_converter = config.threads - WARP * converter_warps
    vectors = head_dim // 8

    @T.macro
    def load_tile(KV, num_blocks, strides, tile_SND, stage, ready, index, lane, column, key0, kv_head, page):
        if lane == 0:
            T.mbarrier_arrive_expect_tx(ready[index], block_n * head_dim * stored_bytes)
        T.sync_warp()
        # Each lane's box: rows of one page, some columns.
        if lane < copies:
            T.tma_load(
                pages_box(KV, stored_dtype, head_dim, (num_blocks, num_kv_heads, page_size), strides, box_rows),
                ready[index],
                T.access_ptr(
                    tile_SND[stage, lane // stored_across * box_rows, lane % stored_across * stored_columns], "w"
                ),
                column + lane % stored_across * stored_columns,
                (key0 + lane // stored_across * box_rows) % page_size if page_size > box_rows else 0,
                kv_head,
                page,
                0,
            )

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

    def first_visible(first_limit):
        """The first key that some query of the tile sees."""
        return T.max(first_limit - (window - 1), 0) if window is not None else 0

    @T.prim_func
    def prefill_hopper_kernel(
        q_ptr: T.ptr,
        kv_ptr: T.ptr,
        o_ptr: T.ptr,
        lse_ptr: T.ptr,
        sinks_ptr: T.ptr,
        k_scale_ptr: T.ptr,
        v_scale_ptr: T.ptr,
        block_table_ptr: T.ptr,
        cu_seqlens_q_ptr: T.ptr,
        seq_lens_ptr: T.ptr,
        work_ptr: T.ptr,
        counter_ptr: T.ptr,
        partial_o_ptr: T.ptr,
        partial_lse_ptr: T.ptr,
        num_work: T.int32,
        num_rows: T.int32,
        num_blocks: T.int32,
        max_blocks: T.int32,
        softmax_scale: T.float32,
        q_stride_t: T.int64,
        q_stride_h: T.int64,
        k_stride_b: T.int64,
        k_stride_h: T.int64,
        k_stride_s: T.int64,
        o_stride_t: T.int64,
        o_stride_h: T.int64,
        block_table_stride: T.int64,
        lse_stride_h: T.int64,
    ):
        Q = dialect.tensor(q_ptr, [num_heads, head_dim], dtype, [q_stride_t, q_stride_h])
        KV = dialect.kv_cache(kv_ptr, problem, [k_stride_b, k_stride_h, k_stride_s])
        O = dialect.tensor(o_ptr, [num_heads, head_dim], dtype, [o_stride_t, o_stride_h])
        lse = rows(lse_ptr, ACCUM, lse_stride_h)
        sinks = vector(sinks_ptr, sinks_dtype)
        k_scale = vector(k_scale_ptr, ACCUM)
        v_scale = vector(v_scale_ptr, ACCUM)
        block_table = rows(block_table_ptr, "int32", block_table_stride)
        cu_seqlens_q = vector(cu_seqlens_q_ptr, "int32")
        seq_lens = vector(seq_lens_ptr, "int32")
        work = vector(work_ptr, "int32")
        counter = vector(counter_ptr, "int32")
        partial_o = rows(partial_o_ptr, ACCUM, T.int64(head_dim))
        partial_lse = vector(partial_lse_ptr, ACCUM)
        with T.Kernel(T.min(num_work * lanes, dialect.device.multiprocessors), threads=config.threads) as block:
            q_SMD = T.alloc_shared([q_stages, block_m, head_dim], dtype)
            k_SND = T.alloc_shared([num_stages, block_n, head_dim], dtype)
            v_SND = T.alloc_shared([num_stages, block_n, head_dim], VALUE_DTYPE if quantized else dtype)
            notes = T.alloc_shared([q_stages, NOTE_NUMBERS], "int32")
            T.annotate_layout({tile: tilelang.layout.make_swizzled_layout(tile) for tile in (q_SMD, k_SND, v_SND)})
            q_ready = T.alloc_barrier([1] * q_stages)
            # The V warp reads the note, too, and so do the converter's.
            q_free = T.alloc_barrier([consumer_warps + 1 + converter_warps] * q_stages)
            k_ready = T.alloc_barrier([converter_warps if quantized else 1] * num_stages)
            k_free = T.alloc_barrier([consumer_warps] * num_stages)
            v_ready = T.alloc_barrier([converter_warps if quantized else 1] * num_stages)
            v_free = T.alloc_barrier([consumer_warps] * num_stages)
            v_there = T.alloc_barrier([1])
            if quantized:
                T.import_source(HELPERS)
                narrow_k_SND = T.alloc_shared([stored_stages, block_n, head_dim], "uint8")
                narrow_v_SND = T.alloc_shared([stored_stages, block_n, head_dim], "uint8")
                k_landed = T.alloc_barrier([1] * stored_stages)
                k_taken = T.alloc_barrier([converter_warps] * stored_stages)
                v_landed = T.alloc_barrier([1] * stored_stages)
                v_taken = T.alloc_barrier([converter_warps] * stored_stages)
            thread = T.get_thread_binding()

            if thread >= consumers:
                T.set_max_nreg(producer_registers, 0)
            if thread >= consumers and thread < consumers + WARP:
                lane = thread - consumers
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
                            T.mbarrier_arrive_expect_tx(
                                q_ready[slot_q],
                                config.warpgroups * tokens_each * heads * head_dim * ELEMENT_BYTES[dtype],
                            )
                        T.sync_warp()
                        if lane < config.warpgroups * num_columns:
                            T.tma_load(
                                heads_box(
                                    Q, dtype, head_dim, num_heads, num_rows, (q_stride_t, q_stride_h),
                                    heads, tokens_each,
                                ),
                                q_ready[slot_q],
                                T.access_ptr(
                                    q_SMD[slot_q, lane // num_columns * 64, lane % num_columns * columns], "w"
                                ),
                                lane % num_columns * columns,
                                first_head,
                                cu_seqlens_q[request] + token0 + lane // num_columns * tokens_each,
                                0,
                            )  # fmt: skip
                        for tile in T.serial(tiles):
                            if lane < copies:
                                page = block_table[
                                    request,
                                    T.max(
                                        T.min(
                                            ((begin + tile) * block_n + lane // stored_across * box_rows) // page_size,
                                            last_page,
                                        ),
                                        first_page,
                                    ),
                                ]
                            T.mbarrier_wait_parity(
                                (k_taken if quantized else k_free)[(done + tile) % stored_stages],
                                (done + tile) // stored_stages % 2 ^ 1,
                            )
                            load_tile(
                                KV, num_blocks, (k_stride_b, k_stride_h, k_stride_s),
                                narrow_k_SND if quantized else k_SND, (done + tile) % stored_stages,
                                k_landed if quantized else k_ready, (done + tile) % stored_stages,
                                lane, 0, (begin + tile) * block_n, first_head // group, page,
                            )  # fmt: skip
                        done = done + tiles
                        turn = turn + 1
                        if lane == 0:
                            item = T.atomic_add(counter[0], 1, return_prev=True)
                            # As many items are taken here as there are.
                            if item == num_work * lanes - 1:
                                counter[0] = 0
                            item = item + T.min(num_work * lanes, dialect.device.multiprocessors)
                        item = T.shfl_sync(item, 0)
                    else:
                        at_work = 0
                        if lane == 0:
                            notes[slot_q, NUM_TILES] = 0
                            T.mbarrier_arrive(q_ready[slot_q])
            if thread >= consumers + WARP and thread < consumers + 2 * WARP:
                v_lane = thread - consumers - WARP
                v_done = T.alloc_var("int32", init=0)
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
                            if v_lane < copies:
                                v_page = block_table[
                                    v_request,
                                    T.max(
                                        T.min((v_key0 + v_lane // stored_across * box_rows) // page_size, v_last_page),
                                        v_first_key // page_size,
                                    ),
                                ]
                            T.mbarrier_wait_parity(
                                (v_taken if quantized else v_free)[(v_done + tile) % stored_stages],
                                (v_done + tile) // stored_stages % 2 ^ 1,
                            )
                            if quantized:
                                load_tile(
                                    KV, num_blocks, (k_stride_b, k_stride_h, k_stride_s), narrow_v_SND,
                                    (v_done + tile) % stored_stages, v_landed, (v_done + tile) % stored_stages,
                                    v_lane, head_dim, v_key0, v_head, v_page,
                                )  # fmt: skip
                            elif v_key0 + block_n <= v_seq_len and v_key0 >= v_first_key:
                                load_tile(
                                    KV, num_blocks, (k_stride_b, k_stride_h, k_stride_s), v_SND,
                                    (v_done + tile) % num_stages, v_ready, (v_done + tile) % num_stages,
                                    v_lane, head_dim, v_key0, v_head, v_page,
                                )  # fmt: skip
                            else:
                                # Values outside the sequence or the window may be NaN, which a weight of 0 would keep.
                                load_tile(
                                    KV, num_blocks, (k_stride_b, k_stride_h, k_stride_s), v_SND,
                                    (v_done + tile) % num_stages, v_there, 0,
                                    v_lane, head_dim, v_key0, v_head, v_page,
                                )  # fmt: skip
                                T.mbarrier_wait_parity(v_there[0], cleared % 2)
                                cleared = cleared + 1
                                clear_rows(
                                    v_SND, (v_done + tile) % num_stages, v_lane,
                                    T.max(T.min(v_seq_len - v_key0, block_n), 0), block_n,
                                )  # fmt: skip
                                if window is not None:
                                    clear_rows(
                                        v_SND, (v_done + tile) % num_stages, v_lane,
                                        0, T.min(T.max(v_first_key - v_key0, 0), block_n),
                                    )  # fmt: skip
                                T.fence_proxy_async()
                                arrive_warp(v_ready, (v_done + tile) % num_stages)
                        v_done = v_done + v_tiles
                        v_turn = v_turn + 1
            if quantized:
                if thread >= first_converter:
                    convert(
                        thread - first_converter, notes, narrow_k_SND, narrow_v_SND, k_SND, v_SND, q_ready, q_free,
                        k_landed, k_taken, k_ready, k_free, v_landed, v_taken, v_ready, v_free,
                    )  # fmt: skip
            if thread < consumers:
                consume(
                    notes, O, num_rows, (o_stride_t, o_stride_h), lse, sinks, k_scale, v_scale, partial_o, partial_lse,
                    softmax_scale, q_SMD, k_SND, v_SND,
                    q_ready, q_free, k_ready, k_free, v_ready, v_free,
                )  # fmt: skip

    return prefill_hopper_kernel
