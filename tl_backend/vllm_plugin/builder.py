"""The step's metadata, and the builder that makes it and compiles every kernel before the server is ready."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from vllm import envs
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)

from tl_backend import ops
from tl_backend.problem import AttentionProblem
from tl_backend.vllm_plugin.kernels import prepare_kernels
from tl_backend.vllm_plugin.layer import LayerShape, dtype_name, kv_dtype_name, problem_of, refuse, refuse_run

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CAUSAL_SPECS = (FullAttentionSpec, SlidingWindowSpec)


@dataclass
class TileLangMetadata:
    """One step, shared by the layers of a KV-cache group.

    A plain mutable dataclass: vLLM's wrappers set attributes and change the class.

    Attributes:
        num_actual_tokens: query rows of this step, padding included.
        max_query_len: longest query.
        query_start_loc: int32 ``[num_reqs + 1]``, on the device.
        max_seq_len: longest context, or a bound on it.
        seq_lens: int32 ``[num_reqs]``, on the device.
        block_table: int32 ``[num_reqs, max_blocks]``, on the device.
        slot_mapping: int64 ``[num_actual_tokens]``, on the device.
        plans: one plan a distinct problem, by the shape of the layers that have it.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    plans: dict[LayerShape, ops.AttentionPlan]
    causal: bool = True


class TileLangMetadataBuilder(AttentionMetadataBuilder[TileLangMetadata]):
    """One a KV-cache group (and micro-batch). Constructed while vLLM sets up the cache, before it serves.

    Raises:
        UnsupportedError: a layer, the cache or a feature of the run that the kernels do not serve, by name.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    # Model runner V1 moves requests of one token to the front, where the plan sends them to the decode kernel.
    reorder_batch_threshold: int | None = 1

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refuse_run(vllm_config)
        _refuse_spec(kv_cache_spec)
        scheduler = vllm_config.scheduler_config
        graph_tokens = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self._problems = _problems_of_layers(kv_cache_spec, layer_names, vllm_config)
        prepare_kernels(self._problems.values(), device, vllm_config)
        self._workspaces = {
            shape: ops.AttentionWorkspace(
                problem,
                device,
                # Graph sizes pad steps: FLASH_ATTN sizes its buffers by the same maximum.
                max_num_reqs=max(scheduler.max_num_seqs, graph_tokens),
                max_num_tokens=max(scheduler.max_num_batched_tokens, graph_tokens),
                batch_invariant=envs.VLLM_BATCH_INVARIANT,
            )
            for shape, problem in self._problems.items()
        }

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TileLangMetadata:
        """The metadata of a step. Neither waits for the device nor allocates: the plan lives in the workspace.

        Raises:
            UnsupportedError: the step is causal where its layers are not, or the reverse, or causal by request.
        """
        common = common_attn_metadata
        causal = {shape.causal for shape in self._problems}
        if causal != {common.causal}:
            value = "a tensor, one flag a request" if isinstance(common.causal, torch.Tensor) else common.causal
            refuse("causal", value, f"this group's layers are {'causal' if True in causal else 'not causal'}")
        plans = {
            shape: ops.plan_attention(
                problem,
                common.query_start_loc,
                common.seq_lens,
                cu_seqlens_q_cpu=common.query_start_loc_cpu,
                max_seqlen_q=common.max_query_len,
                max_seqlen_k=common.max_seq_len,
                workspace=self._workspaces[shape],
                seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound,
            )
            for shape, problem in self._problems.items()
        }
        return TileLangMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            plans=plans,
        )


def _problems_of_layers(
    spec: AttentionSpec, layer_names: list[str], config: VllmConfig
) -> dict[LayerShape, AttentionProblem]:
    """The distinct problems of these layers; the spec's one for names that are not registered (vLLM's own tests)."""
    model = config.model_config
    layers = get_layers_from_vllm_config(config, cast("type[Any]", AttentionLayerBase), layer_names).values()
    # Value head sizes are a layer's own, and no part of its shape: each is asked, and refused if it differs.
    shapes = {layer.impl.shape: layer.impl.shape.head_dim for layer in layers}
    for layer in layers:
        problem_of(layer.impl.shape, page_size=spec.block_size, head_dim_v=layer.head_size_v)
    if not shapes:
        is_paged = type(spec) is not EncoderOnlyAttentionSpec
        heads = model.get_num_attention_heads(config.parallel_config)
        shape = LayerShape(
            heads,
            spec.num_kv_heads,
            spec.head_size,
            dtype=dtype_name(model.dtype),
            kv_dtype=kv_dtype_name(config.cache_config.cache_dtype if is_paged else "auto", model.dtype),
            window=getattr(spec, "sliding_window", None),
            causal=type(spec) in CAUSAL_SPECS,
            is_paged=is_paged,
        )
        shapes = {shape: getattr(spec, "head_size_v", None) or spec.head_size}
    return {
        shape: problem_of(shape, page_size=spec.block_size, head_dim_v=head_dim_v)
        for shape, head_dim_v in shapes.items()
    }


def _refuse_spec(spec: AttentionSpec) -> None:
    # Subclasses (stored sinks, MLA) and relatives (chunked-local) change what the step's metadata means.
    served = (*CAUSAL_SPECS, CrossAttentionSpec, EncoderOnlyAttentionSpec)
    if type(spec) not in served:
        names = ", ".join(kind.__name__ for kind in served)
        refuse("KV-cache spec", type(spec).__name__, f"{names} are supported")
    for feature in ("attention_chunk_size", "non_causal"):
        if value := getattr(spec, feature, None):
            refuse(f"KV-cache spec's {feature}", value, "no kernel has it yet")
