"""Other implementations of the same attention, on the tensors of a batch."""

from __future__ import annotations

import os

import torch

from tl_backend.measure.timing import Launch
from tl_backend.measure.workload import Batch


def flash_attention_3(batch: Batch) -> tuple[Launch, torch.Tensor] | None:
    """FA3 as vLLM builds it, without scheduler metadata, and its output; None unless FA3_LIBRARY names it."""
    library = os.environ.get("FA3_LIBRARY")
    if not library:
        return None
    torch.ops.load_library(library)
    head_dim = batch.workload.problem.head_dim
    out = torch.full_like(batch.q, torch.nan, memory_format=torch.contiguous_format)
    keys, values = batch.store.split(head_dim, dim=-1)
    # Positions as in vllm/vllm_flash_attn/flash_attn_interface.py of vLLM 0.33.
    before = (batch.q, keys, values, None, None, None, out, batch.starts, None, None, None, batch.seq_lens)
    lens = (batch.max_q, batch.max_k, batch.block_table)
    after = (head_dim**-0.5, True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None)

    def launch() -> None:
        torch.ops._vllm_fa3_C.fwd(*before, *lens, *[None] * 8, *after)

    return launch, out
