"""One attention layer: refuses at construction what the kernels do not serve, then passes tensors on to ``ops``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionLayer, AttentionType

from tl_backend import ops
from tl_backend.device import DeviceSpec
from tl_backend.errors import UnsupportedError
from tl_backend.problem import page_size_refusal
from tl_backend.vllm_plugin.backend import SERVED_TYPES
from tl_backend.vllm_plugin.layer import LayerShape, dtype_name, kv_dtype_name, problem_of, refuse

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
        alibi_slopes, sliding_window, logits_soft_cap: None (or a cap of 0) for none.
        kv_cache_dtype: "auto", the model's dtype, or an 8-bit one: "fp8", "fp8_e4m3", "fp8_e5m2".
        attn_type: "decoder"; "encoder_only", which reads no cache; or "encoder_decoder", whose cache holds the
            encoder's keys.
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
        if attn_type not in SERVED_TYPES:
            refuse(
                "attention type",
                str(getattr(attn_type, "value", attn_type)),
                f"{', '.join(SERVED_TYPES)} are supported",
            )
        is_paged = attn_type != AttentionType.ENCODER_ONLY
        self.sinks = extra.pop("sinks", None)  # Filled in later, in place: read at launch.
        if self.sinks is not None and tuple(self.sinks.shape) != (num_heads,):
            refuse("sinks", list(self.sinks.shape), f"one for each of {num_heads} query heads")
        dtype = torch.get_default_dtype()  # vLLM builds the model under it: that of weights and activations.
        self.shape = LayerShape(
            self.num_heads,
            self.num_kv_heads,
            head_size,
            dtype=dtype_name(dtype),
            kv_dtype=kv_dtype_name(kv_cache_dtype if is_paged else "auto", dtype),
            window=sliding_window,
            soft_cap=logits_soft_cap or None,  # 0 is vLLM's other "none".
            sinks_dtype=None if self.sinks is None else dtype_name(self.sinks.dtype),
            has_alibi=alibi_slopes is not None,
            causal=attn_type == AttentionType.DECODER,
            is_paged=is_paged,
        )
        _refuse_block_size()
        problem = problem_of(self.shape)
        device = torch.device(current_platform.device_type)
        if reason := ops.unsupported_reason(problem, DeviceSpec.of(device)):
            raise UnsupportedError(reason)
        # vLLM passes an 8-bit cache as uint8.
        self._stored_as = getattr(torch, problem.kv_dtype) if problem.is_quantized else None
        self._alibi_slopes, self._slopes = alibi_slopes, None
        if alibi_slopes is not None:
            self._slopes = torch.tensor(alibi_slopes, dtype=torch.float32, device=device)
        for name, value in extra.items():
            # Absent, off, and -1 (chunk_lookback) are how models spell "not used".
            if value is not None and value is not False and not (isinstance(value, int) and value < 0):
                refuse(f"attention argument {name}", value, "the TileLang backend does not know it")

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Called whenever weights have been loaded, also after a sleep of level 2, which loses the slopes."""
        if self._slopes is not None:
            self._slopes.copy_(torch.tensor(self._alibi_slopes, dtype=torch.float32))

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

        Writes ``output [T, H, D]``. ``key`` and ``value`` are in the cache already and not read, but in encoder-only
        layers, which have no cache. T may exceed the step's tokens: those rows are zeroed.

        Raises:
            UnsupportedError: a quantized output is asked for.
        """
        if attn_metadata is None:  # vLLM's memory profiling run.
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            refuse("fused output quantization", "an output scale", "the kernels write the model's dtype")
        plan = attn_metadata.plans[self.shape]
        if not self.shape.is_paged and key is not None and value is not None:
            return ops.varlen_attention(
                query,
                key,
                value,
                attn_metadata.query_start_loc,
                attn_metadata.query_start_loc,
                max_seqlen_q=attn_metadata.max_query_len,
                max_seqlen_k=attn_metadata.max_query_len,
                out=output,
                softmax_scale=self.scale,
                causal=False,
                sinks=self.sinks,
                alibi_slopes=self._slopes,
                plan=plan,
            )
        stored_as = self._stored_as
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
            causal=self.shape.causal,
            sinks=self.sinks,
            alibi_slopes=self._slopes,
            k_scale=layer._k_scale if stored_as else None,
            v_scale=layer._v_scale if stored_as else None,
            plan=plan,
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
        if not self.shape.is_paged:
            return
        if self._stored_as is None:
            ops.paged_cache_write(key, value, kv_cache, slot_mapping)
        else:
            stored = kv_cache.view(self._stored_as)
            ops.paged_cache_write(key, value, stored, slot_mapping, k_scale=layer._k_scale, v_scale=layer._v_scale)


def _refuse_block_size() -> None:
    """By name and with a remedy; vLLM's CPU platform would find no common block size, after the model has loaded."""
    config = get_current_vllm_config_or_none()
    block_size = None if config is None else config.cache_config.block_size
    if block_size is not None and (reason := page_size_refusal(block_size)):
        raise UnsupportedError(reason)
