"""How Hopper's prefill fetches a tile of K or V: one warp, by TMA, each lane a box of keys that crosses no page.

The warp of K is in ``kernels/prefill_hopper_scheduler.py``, that of V in ``kernels/prefill_hopper_values.py``.

Legend: S slots of a ring, N keys of a KV tile, D head size.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from tl_backend.configs.prefill_hopper import HopperPrefillConfig, swizzled_columns
from tl_backend.configs.tile import ELEMENT_BYTES
from tl_backend.kernels.hopper import pages_box
from tl_backend.problem import AttentionProblem


@dataclass(frozen=True)
class LoadProgram:
    """Macros and helpers for one (problem, config), and what they close over.

    Attributes:
        stages: of the ring that tiles land in: as they are stored, so that of an 8-bit cache it is not the consumers'.
        copies: lanes that have a box.
        page_column: column of the block table where a lane's box is.
        load_tile: the macro: one tile, and its barrier.
    """

    stages: int
    copies: int
    page_column: Any
    load_tile: Any


def load_program(problem: AttentionProblem, config: HopperPrefillConfig) -> LoadProgram:
    """Build the macro. It closes over the problem and the config, which are constants of the trace."""
    block_n, head_dim, page_size = config.block_n, problem.head_dim, problem.page_size
    num_kv_heads, quantized = problem.num_kv_heads, problem.is_quantized
    box_rows, copies = config.box_rows(problem), config.copies(problem)
    dtype, element_bytes = ("uint8", 1) if quantized else (problem.dtype, ELEMENT_BYTES[problem.dtype])
    columns = head_dim if quantized else swizzled_columns(head_dim)
    across = head_dim // columns  # Boxes side by side.

    def page_column(key0, lane, first_page, last_page):
        """No column outside of those two is read."""
        return T.max(T.min((key0 + lane // across * box_rows) // page_size, last_page), first_page)

    @T.macro
    def load_tile(KV, num_blocks, strides, tile_SND, stage, ready, index, lane, column, key0, kv_head, page):
        if lane == 0:
            T.mbarrier_arrive_expect_tx(ready[index], block_n * head_dim * element_bytes)
        T.sync_warp()
        # Each lane's box: rows of one page, some columns.
        if lane < copies:
            T.tma_load(
                pages_box(KV, dtype, head_dim, (num_blocks, num_kv_heads, page_size), strides, box_rows),
                ready[index],
                T.access_ptr(tile_SND[stage, lane // across * box_rows, lane % across * columns], "w"),
                column + lane % across * columns,
                (key0 + lane // across * box_rows) % page_size if page_size > box_rows else 0,
                kv_head,
                page,
                0,
            )

    return LoadProgram(
        stages=config.narrow_stages if quantized else config.num_stages,
        copies=copies,
        page_column=page_column,
        load_tile=load_tile,
    )
