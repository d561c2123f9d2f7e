"""The attentions of vLLM: its Triton kernel, and FlashAttention-3 as it builds it."""

from __future__ import annotations

import importlib.util
import os
from math import gcd
from typing import Any

import torch

from tl_backend.measure.peer import NotThereError, Peer, refuse_features
from tl_backend.measure.workload import Batch

# As vLLM's Triton backend has them: requests up to which a decode is split, and into how many segments.
MIN_BLOCKS, NUM_SEGMENTS = 128, 16
# Contiguous keys are pages in order to a kernel that wants pages: the largest that divide all requests, up to this one.
LARGEST_PAGE = 128


def triton(batch: Batch) -> Peer:
    """The unified attention of vLLM, with the buffers that its backend gives it.

    Contiguous keys are seen as pages that lie in order.

    Raises:
        NotThereError: vLLM or Triton is not installed, the device is a CPU, or contiguous keys cannot be cut in pages.
    """
    refuse_features(batch, "window", "soft cap", "sinks", "ALiBi", "8-bit cache")
    if batch.device.type == "cpu":
        raise NotThereError("it needs a GPU")
    for package in ("vllm", "triton"):
        if importlib.util.find_spec(package) is None:
            raise NotThereError(f"{package} is not installed")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # Stdout is the program's that measures.
    import vllm
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    out = batch.new_out()
    options = triton_arguments(batch, out)
    return Peer(
        what=f"vLLM {vllm.__version__} Triton unified attention",
        launch=lambda: unified_attention(**options),
        output=lambda: out,
    )


def triton_arguments(batch: Batch, out: torch.Tensor) -> dict[str, Any]:
    """The arguments of vLLM's ``unified_attention`` (vLLM 0.32 and 0.33)."""
    keys, values, block_table = _pages(batch)
    p, ones = batch.workload.problem, torch.ones(1, device=batch.device)
    threshold = MIN_BLOCKS // p.num_kv_heads
    shape = (max(threshold, 1), p.num_q_heads, NUM_SEGMENTS)
    width = 1 << (p.head_dim - 1).bit_length()
    left = -1 if p.window is None else p.window - 1
    scales = [
        batch.extras.get(name, ones).expand(len(batch.workload.seq_lens), p.num_kv_heads)
        for name in ("k_scale", "v_scale")
    ]
    arguments = {
        "q": batch.q,
        "k": keys,
        "v": values,
        "out": out,
        "cu_seqlens_q": batch.starts,
        "max_seqlen_q": batch.max_q,
        "seqused_k": batch.seq_lens,
        "max_seqlen_k": batch.max_k,
        "softmax_scale": p.head_dim**-0.5,
        "causal": p.causal,
        "window_size": (left, 0 if p.causal else left),
        "block_table": block_table,
        "softcap": p.soft_cap or 0,
        "q_descale": None,
        "k_descale": scales[0],
        "v_descale": scales[1],
        "seq_threshold_3D": threshold,
        "num_par_softmax_segments": NUM_SEGMENTS,
        "softmax_segm_output": torch.empty((*shape, width), device=batch.device),
        "softmax_segm_max": torch.empty(shape, device=batch.device),
        "softmax_segm_expsum": torch.empty(shape, device=batch.device),
        "alibi_slopes": batch.extras.get("alibi_slopes"),
        "sinks": batch.extras.get("sinks"),
    }
    if p.is_quantized:
        from vllm.v1.kv_cache_interface import KVQuantMode

        arguments["kv_quant_mode"] = KVQuantMode.FP8_PER_TENSOR
    return arguments


def _pages(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values ``[num_blocks, page, HK, D]`` and the block table."""
    p, lens = batch.workload.problem, batch.workload.seq_lens
    if batch.store is not None and batch.block_table is not None:
        keys, values = batch.store.split(p.head_dim, dim=-1)
        return keys, values, batch.block_table
    assert batch.k is not None
    assert batch.v is not None
    page = gcd(LARGEST_PAGE, *lens)
    if page < 16:
        raise NotThereError("its pages are of 16 keys at least, and divide no contiguous request here")
    keys, values = (side.view(-1, page, p.num_kv_heads, p.head_dim) for side in (batch.k, batch.v))
    table = torch.zeros(len(lens), max(lens) // page, dtype=torch.int32, device=batch.device)
    first = 0
    for row, length in zip(table, lens, strict=True):
        row[: length // page] = torch.arange(first, first + length // page, device=batch.device)
        first += length // page
    return keys, values, table


def flash_attention_3(batch: Batch) -> Peer:
    """FA3 as vLLM builds it, without scheduler metadata.

    Raises:
        NotThereError: neither FA3_LIBRARY nor an installed vLLM has its library, or the device is not Hopper.
    """
    p = batch.workload.problem
    refuse_features(batch, "window", "soft cap")
    if batch.device.type == "cpu" or torch.version.hip or torch.cuda.get_device_capability(batch.device)[0] != 9:
        raise NotThereError("it needs a Hopper GPU")
    torch.ops.load_library(_library())
    out = batch.new_out()
    if batch.store is not None:
        keys, values = batch.store.split(p.head_dim, dim=-1)
        key_starts, seq_lens = None, batch.seq_lens
    else:
        keys, values, key_starts, seq_lens = batch.k, batch.v, batch.key_starts, None
    window = (-1, -1) if p.window is None else (p.window - 1, 0 if p.causal else p.window - 1)
    # Positions as in vllm/vllm_flash_attn/flash_attn_interface.py of vLLM 0.33.
    before = (batch.q, keys, values, None, None, None, out, batch.starts, key_starts, None, None, seq_lens)
    lens = (batch.max_q, batch.max_k, batch.block_table)
    after = (p.head_dim**-0.5, p.causal, *window, p.soft_cap or 0.0, True, None, 0, None, 0, None, 1, 0, None)

    def launch() -> None:
        torch.ops._vllm_fa3_C.fwd(*before, *lens, *[None] * 8, *after)

    return Peer(what="FlashAttention-3 of vLLM", launch=launch, output=lambda: out)


def _library() -> str:
    """The path of FA3's library: FA3_LIBRARY, or that of an installed vLLM."""
    if path := os.environ.get("FA3_LIBRARY"):
        return path
    vllm = importlib.util.find_spec("vllm")
    for folder in (vllm.submodule_search_locations or ()) if vllm else ():
        path = os.path.join(folder, "vllm_flash_attn", "_vllm_fa3_C.abi3.so")  # noqa: PTH118
        if os.path.exists(path):  # noqa: PTH110
            return path
    raise NotThereError("neither FA3_LIBRARY nor an installed vLLM has its library")
