"""From vLLM's description of an attention layer to an ``AttentionProblem``, and what of it is refused, by name.

On CUDA and ROCm vLLM's selector asks the Backend first. On the CPU nothing does, and no selector knows soft cap, ALiBi
and value head sizes. So the Impl and the builder ask here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tl_backend.errors import UnsupportedError, describe
from tl_backend.problem import PAGE_SIZE_STEP, AttentionProblem

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OTHER_BACKEND = "Serve this model with another attention backend."
# vLLM then turns such attention off (ModelConfig.is_mm_prefix_lm).
TEXT_ONLY = """Pass --limit-mm-per-prompt '{"image": 0}' to serve text alone, or use another attention backend."""


class LayerShape(NamedTuple):
    """What tells the problems of a KV-cache group apart, and leads a layer to its plan. Hashed every call: a tuple.

    Attributes: as those of ``AttentionProblem``. An encoder layer's keys are not paged: they lie beside its queries.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    kv_dtype: str
    window: int | None = None
    soft_cap: float | None = None
    sinks_dtype: str | None = None
    has_alibi: bool = False
    causal: bool = True
    is_paged: bool = True


def dtype_name(dtype: torch.dtype) -> str:
    """The name as ``AttentionProblem`` has it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def kv_dtype_name(kv_cache_dtype: str, dtype: torch.dtype) -> str:
    """The cache's dtype as ``AttentionProblem`` has it: "auto" is ``dtype``, "fp8" the platform's e4m3."""
    if kv_cache_dtype == "auto":
        return dtype_name(dtype)
    if kv_cache_dtype in ("fp8", "fp8_e4m3"):
        from vllm.platforms import current_platform

        return dtype_name(current_platform.fp8_dtype())  # e4m3fnuz on gfx94x
    return "float8_e5m2" if kv_cache_dtype == "fp8_e5m2" else kv_cache_dtype


def problem_of(
    shape: LayerShape, *, page_size: int = PAGE_SIZE_STEP, head_dim_v: int | None = None
) -> AttentionProblem:
    """The problem of a layer.

    Args:
        shape: heads, head size, dtypes and features of the layer on this rank.
        page_size: tokens in a kernel block. The Impl does not know it yet and takes the smallest.
        head_dim_v: default ``shape.head_dim``.

    Raises:
        InvalidInputError, UnsupportedError: as ``AttentionProblem``.
    """
    fields = shape._asdict()
    return AttentionProblem(
        page_size=page_size if fields.pop("is_paged") else None,
        head_dim_v=shape.head_dim if head_dim_v is None else head_dim_v,
        out_dtype=shape.dtype,
        **fields,
    )


def refuse(subject: str, value: object, limit: str, remedy: str = OTHER_BACKEND) -> None:
    """Raise UnsupportedError in the house form."""
    raise UnsupportedError(describe(subject, value=value, limit=limit, remedy=remedy))


def refuse_run(config: VllmConfig) -> None:
    """Refuse features of the whole run that no kernel has, or that nobody has seen work with this backend.

    Raises:
        UnsupportedError: the first one that is on.
    """
    model, parallel = config.model_config, config.parallel_config
    transfer, speculative = config.kv_transfer_config, config.speculative_config
    unset = "Leave it unset."
    features: list[tuple[str, Any, Any, str]] = [  # subject, value, value that means "off", remedy
        ("attention_config.use_non_causal", config.attention_config.use_non_causal, False, OTHER_BACKEND),
        ("bidirectional attention within images", model.is_mm_prefix_lm, False, TEXT_ONLY),
        ("reference sliding window", model.rswa_window, None, OTHER_BACKEND),
        ("--kv-sharing-fast-prefill", config.cache_config.kv_sharing_fast_prefill, False, unset),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size, 1, unset),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size, 1, unset),
        ("--kv-transfer-config", transfer is not None and transfer.is_kv_transfer_instance, False, unset),
        (
            "adaptive verification",
            speculative is not None and speculative.enable_adaptive_verification,
            False,
            "Set enable_adaptive_verification to false.",
        ),
    ]
    for subject, value, off, remedy in features:
        if value != off:
            refuse(subject, value, f"only {off} is supported", remedy)
