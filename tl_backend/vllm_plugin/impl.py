"""One attention layer: refuses at construction what the kernels do not serve, then passes tensors on to ``ops``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionLayer, AttentionType

from tl_backend import ops
from tl_backend.device import DeviceSpec
from tl_backend.errors import UnsupportedError
from tl_backend.vllm_plugin.layer import LayerShape, problem_of, refuse

if TYPE_CHECKING:
    from tl_backend.vllm_plugin.builder import TileLangMetadata


class TileLangImpl(AttentionImpl["TileLangMetadata"]):
    """Positional constructor as vLLM calls it; ``extra`` may hold what a model adds (``sinks``).

    A layer that shares another's cache works as it is: vLLM binds the other's cache to it and skips
    ``do_kv_cache_update``, and ``forward`` reads keys and values from the cache alone.

    Args:
        num_heads: query heads on this rank.
        head_size: of query, key and value.
        scale: softmax scale.
        num_kv_heads: default ``num_heads``.
        alibi_slopes, sliding_window, logits_soft_cap: refused unless None (or a cap of 0).
        kv_cache_dtype: "auto", or the model's dtype.
        attn_type: "decoder".
        kv_sharing_target_layer_name: the layer whose cache this one reads, or None.

    Raises:
        UnsupportedError: by name, with the limit and the remedy.
        InvalidInputError: head counts do not fit.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.shape = LayerShape(self.num_heads, self.num_kv_heads, head_size)

        if attn_type != AttentionType.DECODER:
            refuse("attention type", str(getattr(attn_type, "value", attn_type)), "decoder is supported")
        sinks = extra.pop("sinks", None)
        problem = problem_of(
            self.shape,
            # vLLM builds the model under this default: it is the dtype of weights and activations.
            dtype=torch.get_default_dtype(),
            kv_cache_dtype=kv_cache_dtype,
            window=sliding_window,
            soft_cap=logits_soft_cap,
            has_sinks=sinks is not None,
            has_alibi=alibi_slopes is not None,
        )
        if reason := ops.unsupported_reason(problem, DeviceSpec.of(torch.device(current_platform.device_type))):
            raise UnsupportedError(reason)
        for name, value in extra.items():
            # Absent, off, and -1 (chunk_lookback) are how models spell "not used".
            if value is not None and value is not False and not (isinstance(value, int) and value < 0):
                refuse(f"attention argument {name}", value, "the TileLang backend does not know it")

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: TileLangMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of ``query [T, H, D]`` over ``kv_cache [num_blocks, HK, block_size, 2*D]``.

        Writes ``output [T, H, D]``. ``key`` and ``value`` are in the cache already and not read. T may exceed the
        step's tokens: those rows are zeroed.

        Raises:
            UnsupportedError: a quantized output is asked for.
        """
        if attn_metadata is None:  # vLLM's memory profiling run.
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            refuse("fused output quantization", "an output scale", "the kernels write the model's dtype")
        return ops.paged_attention(
            query,
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            max_seqlen_q=attn_metadata.max_query_len,
            max_seqlen_k=attn_metadata.max_seq_len,
            out=output,
            softmax_scale=self.scale,
            plan=attn_metadata.plans[self.shape],
        )

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write ``key`` and ``value`` ``[T, HK, D]`` to their slots, as many as there are; -1 is skipped."""
        ops.paged_cache_write(key, value, kv_cache, slot_mapping)
