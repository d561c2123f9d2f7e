"""The attentions of vLLM: its Triton kernel, and FlashAttention-3 as it builds it."""

from __future__ import annotations

import importlib.util
import os
from functools import partial
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
    """FA3 as vLLM calls it: with the scheduler metadata of the step, where vLLM makes any.

    Raises:
        NotThereError: neither FA3_LIBRARY nor an installed vLLM has its library, or the device is not Hopper.
    """
    refuse_features(batch, "window", "soft cap", "sinks")
    return _flash_attention_3(batch, batch.store, "FlashAttention-3 of vLLM")


def flash_attention_3_16_bit(batch: Batch) -> Peer:
    """FA3 as vLLM calls it, on a 16-bit copy of an 8-bit cache: on the cache itself it would round the queries, too.

    Raises:
        NotThereError: as above.
    """
    p = batch.workload.problem
    if not p.is_quantized:
        return flash_attention_3(batch)
    refuse_features(batch, "window", "soft cap", "sinks", "8-bit cache")
    assert batch.store is not None
    halves = (
        side.to(torch.float32) * batch.extras[scale]
        for side, scale in zip(batch.store.split(p.head_dim, dim=-1), ("k_scale", "v_scale"), strict=True)
    )
    copy = torch.cat(tuple(halves), dim=-1).to(batch.q.dtype)
    return _flash_attention_3(batch, copy, f"FlashAttention-3 of vLLM on a {p.dtype} copy of the cache")


def _flash_attention_3(batch: Batch, store: torch.Tensor | None, what: str) -> Peer:
    """``store``: of keys and values, as ``batch.store`` has them; None where they are not paged."""
    if batch.device.type == "cpu" or torch.version.hip or torch.cuda.get_device_capability(batch.device)[0] != 9:
        raise NotThereError("it needs a Hopper GPU")
    torch.ops.load_library(_library())
    out, fa3 = batch.new_out(), torch.ops._vllm_fa3_C
    prepare = partial(fa3.get_scheduler_metadata, *metadata_arguments(batch)) if makes_metadata(batch) else None
    arguments = flash_attention_3_arguments(batch, store, out, None if prepare is None else prepare())
    return Peer(what=what, launch=lambda: fa3.fwd(*arguments), output=lambda: out, prepare=prepare)


def makes_metadata(batch: Batch) -> bool:
    """Whether vLLM's builder makes FA3's scheduler metadata for a layer like this one.

    It does not where windows differ between layers. The models with windows, soft caps or sinks alternate layers with
    and without a window: so it makes none for those.
    """
    p = batch.workload.problem
    return p.is_paged and p.window is None and p.soft_cap is None and p.sinks_dtype is None


def metadata_arguments(batch: Batch) -> tuple[Any, ...]:
    """Of FA3's ``get_scheduler_metadata``, as in vllm/v1/attention/backends/flash_attn.py of vLLM 0.33."""
    p = batch.workload.problem
    sizes = (len(batch.workload.seq_lens), batch.max_q, batch.max_k, p.num_q_heads, p.num_kv_heads, p.head_dim)
    lens = (batch.seq_lens, batch.starts, None, None, None, None, p.page_size, 0)
    # No window, no soft cap, splits by its own heuristic, heads packed by its own, all multiprocessors.
    return (*sizes, p.head_dim, batch.q.dtype, *lens, p.causal, -1, -1, False, 0, None, 0)


def flash_attention_3_arguments(
    batch: Batch, store: torch.Tensor | None, out: torch.Tensor, metadata: torch.Tensor | None
) -> tuple[Any, ...]:
    """Of FA3's ``fwd``, as in vllm/vllm_flash_attn/flash_attn_interface.py of vLLM 0.33."""
    p = batch.workload.problem
    if store is not None:
        keys, values = store.split(p.head_dim, dim=-1)
        key_starts, seq_lens = None, batch.seq_lens
    else:
        keys, values, key_starts, seq_lens = batch.k, batch.v, batch.key_starts, None
    window = (-1, -1) if p.window is None else (p.window - 1, 0 if p.causal else p.window - 1)
    before = (batch.q, keys, values, None, None, None, out, batch.starts, key_starts, None, None, seq_lens)
    lens = (batch.max_q, batch.max_k, batch.block_table)
    nothing = (None,) * 8  # Of another batch index, left padding, rotary embeddings and scales.
    features = (p.head_dim**-0.5, p.causal, *window, p.soft_cap or 0.0, True)
    return (*before, *lens, *nothing, *features, metadata, 0, None, 0, batch.extras.get("sinks"), 1, 0, None)


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
