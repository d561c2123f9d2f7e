"""Varlen prefill over a paged cache for Hopper: warp-specialised, on persistent blocks. The kernel's frame.

Its arguments, what lies in shared memory, the barriers, and which threads have which role. One block a multiprocessor
takes items until none is left. Each role has its file:

- ``prefill_hopper_scheduler``: the warp that takes items, leaves a note of each and loads Q and K
- ``prefill_hopper_values``: the warp that loads V
- ``prefill_hopper_fp8``: the converter, between those two and the consumers, where the cache holds 8-bit floats
- ``prefill_hopper_consumer``: a warpgroup's walk over the KV tiles of its 64 rows; ``prefill_hopper_softmax`` has the
  arithmetic, ``prefill_hopper_epilogue`` what follows the last tile, ``prefill_hopper_rows`` what a row stands for

What roles share: ``prefill_hopper_load`` fetches a tile of K or V, ``prefill_hopper_notes`` says what a note holds, and
``hopper`` has the constructs.

Legend: T query rows, H query heads, HK kv heads, D head size, R requests, W work items, S slots of a ring, M rows of a
tile, N keys of a KV tile.
"""

from typing import Any

import tilelang
import tilelang.language as T

from tl_backend.configs.prefill_hopper import NOTE_NUMBERS, WARP, WARPGROUP, HopperPrefillConfig
from tl_backend.kernels.dialect import Dialect, rows, vector
from tl_backend.kernels.prefill_hopper_consumer import consumer_program
from tl_backend.kernels.prefill_hopper_fp8 import HELPERS, VALUE_DTYPE, converter_program
from tl_backend.kernels.prefill_hopper_scheduler import lanes_of, scheduler_program
from tl_backend.kernels.prefill_hopper_values import values_program
from tl_backend.kernels.tile import ACCUM
from tl_backend.problem import AttentionProblem


def prefill_hopper(problem: AttentionProblem, config: HopperPrefillConfig, dialect: Dialect) -> Any:
    """The prim_func.

    Q ``[T, H, D]``, KV the cache ``[num_blocks, HK, page, 2 * D]``, O ``[T, H, D]``, block_table int32
    ``[R, max_blocks]``, cu_seqlens_q int32 ``[R + 1]``, seq_lens int32 ``[R]``, work int32 ``[W, 4]`` of (request,
    first token, piece | pieces << 16, slot), longest first. Where the problem has them: lse float32 ``[H, T]`` (natural
    log), sinks float32 ``[H]``, k_scale and v_scale float32 ``[1]``. counter int32 ``[1]``: zero, before and after.

    Pieces of a tile that is split write float32 partial_o ``[>= slot + tokens * pieces, H, D]`` and partial_lse (base
    2), at rows slot + token * pieces + piece, for a combine.
    """
    block_m, block_n, num_stages, q_stages = config.block_m, config.block_n, config.num_stages, config.q_stages
    dtype, head_dim, num_heads = problem.dtype, problem.head_dim, problem.num_q_heads
    lanes = lanes_of(problem, config)
    consumers = WARPGROUP * config.warpgroups
    consumer_warps = 4 * config.warpgroups
    producer_registers = config.role_registers[1]
    sinks_dtype = problem.sinks_dtype or ACCUM
    quantized, converter_warps, narrow_stages = problem.is_quantized, config.converter_warps, config.narrow_stages
    first_converter = config.threads - WARP * converter_warps
    schedule = scheduler_program(problem, config)
    load_values = values_program(problem, config)
    convert = converter_program(problem, config) if quantized else None
    consume = consumer_program(problem, config)

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
            # Who reads the note: the consumers, the warp of V, the converter.
            q_free = T.alloc_barrier([consumer_warps + 1 + converter_warps] * q_stages)
            k_ready = T.alloc_barrier([converter_warps if quantized else 1] * num_stages)
            k_free = T.alloc_barrier([consumer_warps] * num_stages)
            v_ready = T.alloc_barrier([converter_warps if quantized else 1] * num_stages)
            v_free = T.alloc_barrier([consumer_warps] * num_stages)
            v_there = T.alloc_barrier([1])
            if quantized:
                T.import_source(HELPERS)
                narrow_k_SND = T.alloc_shared([narrow_stages, block_n, head_dim], "uint8")
                narrow_v_SND = T.alloc_shared([narrow_stages, block_n, head_dim], "uint8")
                k_landed = T.alloc_barrier([1] * narrow_stages)
                k_taken = T.alloc_barrier([converter_warps] * narrow_stages)
                v_landed = T.alloc_barrier([1] * narrow_stages)
                v_taken = T.alloc_barrier([converter_warps] * narrow_stages)
            thread = T.get_thread_binding()

            if thread >= consumers:
                T.set_max_nreg(producer_registers, 0)
            if thread >= consumers and thread < consumers + WARP:
                schedule(
                    thread - consumers, block, T.min(num_work * lanes, dialect.device.multiprocessors), notes,
                    Q, num_rows, (q_stride_t, q_stride_h),
                    KV, num_blocks, (k_stride_b, k_stride_h, k_stride_s), block_table, max_blocks,
                    cu_seqlens_q, seq_lens, work, num_work, counter,
                    q_SMD, narrow_k_SND if quantized else k_SND, q_ready, q_free,
                    k_landed if quantized else k_ready, k_taken if quantized else k_free,
                )  # fmt: skip
            if thread >= consumers + WARP and thread < consumers + 2 * WARP:
                load_values(
                    thread - consumers - WARP, notes, KV, num_blocks, (k_stride_b, k_stride_h, k_stride_s), block_table,
                    narrow_v_SND if quantized else v_SND, q_ready, q_free,
                    v_landed if quantized else v_ready, v_taken if quantized else v_free, v_there,
                )  # fmt: skip
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
