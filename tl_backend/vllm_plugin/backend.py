"""What the backend declares to vLLM. Each declaration is a contract, which tests/vllm_plugin/test_backend.py checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from tl_backend.device import HOPPER_PAGE_SIZE, MIN_NVIDIA_ARCH
from tl_backend.errors import describe
from tl_backend.problem import PAGE_SIZE_STEP, SUPPORTED_HEAD_DIMS, head_dim_refusal, page_size_refusal
from tl_backend.vllm_plugin.layer import dtype_name
from tl_backend.vllm_plugin.register import NAME

if TYPE_CHECKING:
    from vllm.config.cache import CacheDType
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from tl_backend.vllm_plugin.builder import TileLangMetadataBuilder
    from tl_backend.vllm_plugin.impl import TileLangImpl

FP8_SPELLINGS: tuple[CacheDType, ...] = ("fp8", "fp8_e4m3", "fp8_e5m2")

# gfx90a, gfx942 and gfx950 as vLLM numbers them. gfx908 and gfx940 share numbers; DeviceSpec.of refuses them by name.
ROCM_CAPABILITIES = ((9, 0), (9, 4), (9, 5))

HOPPER = (9, 0)

SERVED_TYPES = (AttentionType.DECODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER)


def declared_dtypes(*, cpu: bool) -> list[torch.dtype]:
    """What ``DeviceSpec.dtypes`` says, without a device: vLLM reads this in processes that must not touch one."""
    return [torch.float32] if cpu else [torch.float16, torch.bfloat16]


class TileLangBackend(AttentionBackend):
    """Attention on TileLang kernels: see ``supports_*`` for what is in, and what is not.

    ``validate_configuration`` stays vLLM's: its signature grows from version to version.
    """

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = declared_dtypes(cpu=current_platform.is_cpu())
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto", "float16", "bfloat16", *FP8_SPELLINGS]

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[TileLangImpl]:
        from tl_backend.vllm_plugin.impl import TileLangImpl

        return TileLangImpl

    @staticmethod
    def get_builder_cls() -> type[TileLangMetadataBuilder]:
        from tl_backend.vllm_plugin.builder import TileLangMetadataBuilder

        return TileLangMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Any multiple of 16, so that the odd block sizes of hybrid models (272, 528, 1056, ...) are not split."""
        return [MultipleOf(PAGE_SIZE_STEP)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """What a server has that was given no ``--block-size``. vLLM asks a worker, once its model is loaded."""
        if current_platform.is_cuda() and current_platform.is_device_capability(HOPPER):
            return max(default_block_size, HOPPER_PAGE_SIZE)
        preferred: int = super().get_preferred_block_size(default_block_size)
        return preferred

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(SUPPORTED_HEAD_DIMS)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Kernels take strides: all but what scatters a block's heads. First LBHNC: it keeps a head's page dense."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        if current_platform.is_rocm():
            return tuple(capability) in ROCM_CAPABILITIES
        return tuple(capability) >= MIN_NVIDIA_ARCH

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in SERVED_TYPES

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True  # The builder then sends every request through the prefill.

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False  # Nobody has seen one work with this backend.

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # The prefill work list is made from the CPU's query lengths.

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        block_size: int | None,
        *_rest: Any,
        **_named: Any,
    ) -> str | None:
        """The refusals with value, limit and remedy, where vLLM's own check says only "head_size not supported".

        Open at the end: later versions of vLLM pass more.
        """
        name = dtype_name(dtype)
        reasons = [head_dim_refusal(head_size)]
        if block_size is not None:
            reasons.append(page_size_refusal(block_size))
        if not cls.supports_dtype(dtype):
            supported = " and ".join(dtype_name(d) for d in cls.supported_dtypes)
            reasons.append(
                describe(
                    "dtype",
                    value=name,
                    limit=f"{supported} are supported on this device",
                    remedy=f"Pass --dtype {dtype_name(cls.supported_dtypes[-1])}.",
                )
            )
        if kv_cache_dtype not in (None, "auto", name, *FP8_SPELLINGS):
            reasons.append(
                describe(
                    "KV-cache dtype",
                    value=kv_cache_dtype,
                    limit=f"the model's, {name}, and {', '.join(FP8_SPELLINGS)} are supported",
                    remedy="Pass --kv-cache-dtype auto.",
                )
            )
        return " ".join(reason for reason in reasons if reason) or None
