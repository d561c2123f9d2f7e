"""The public write into a paged KV cache."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from tl_backend.configs.cache_write import default_cache_write_config
from tl_backend.device import DeviceSpec
from tl_backend.ops.checks import (
    address_mask,
    check_current_device,
    check_device,
    check_index,
    check_shape,
    check_supported,
    checked_scales,
    dtype_name,
    kernel_strides,
    require,
)
from tl_backend.ops.compiled import KERNELS, Kernel, KernelKey
from tl_backend.problem import FLOAT8_DTYPES, AttentionProblem
from tl_backend.telemetry import launches


def paged_cache_write(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens to their slots.

    Slot s is row ``s % block_size`` of block ``s // block_size``. Slots of -1 (any negative) and slots past the cache
    are skipped. Two tokens must not share a slot.

    Args:
        key: ``[>= n, HK, D]``, dtype of the cache, or any 16- or 32-bit one for an 8-bit cache; rows may be strided.
        value: as key.
        kv_cache: ``[num_blocks, HK, block_size, 2 * D]``, any strides but a dense last dimension; written in place.
        slot_mapping: int64 ``[n]``. Its length says how many tokens there are: rows of key past it are padding.
        k_scale, v_scale: float32, one element, for an 8-bit cache: what is stored is divided by them. Default 1.

    Raises:
        InvalidInputError: an argument is malformed.
        UnsupportedError: no kernel serves the request.
        EnvironmentProblemError: the kernel cannot be compiled here.
    """
    looks = (  # All that the checks and the launch depend on, but for addresses and the current device.
        key.shape, key.stride(), key.dtype, key.device,
        value.shape, value.stride(), value.dtype, value.device,
        kv_cache.shape, kv_cache.stride(), kv_cache.dtype, kv_cache.device,
        slot_mapping.shape, slot_mapping.stride(), slot_mapping.dtype, slot_mapping.device,
        None if k_scale is None else (k_scale.shape, k_scale.dtype, k_scale.device),
        None if v_scale is None else (v_scale.shape, v_scale.dtype, v_scale.device),
    )  # fmt: skip
    write = CHECKED.get(looks)
    if write is None:
        write = _checked(key, value, kv_cache, slot_mapping, k_scale, v_scale)
        if len(CHECKED) >= MAX_CHECKED:
            CHECKED.clear()
        # A scale that is made while a graph is captured has its value only once the graph runs.
        if write.one is None or not (kv_cache.is_cuda and torch.cuda.is_current_stream_capturing()):
            CHECKED[looks] = write
    elif write.kernel is not None:
        check_current_device(kv_cache)
    if write.kernel is None:
        return
    key_at, value_at, cache_at = key.data_ptr(), value.data_ptr(), kv_cache.data_ptr()
    if (key_at | value_at | cache_at) & write.mask:
        for name, tensor in (("key", key), ("value", value), ("kv_cache", kv_cache)):
            kernel_strides(name, tensor, write.spec)
    launches.record("cache_write")
    write.kernel(
        key_at,
        value_at,
        cache_at,
        slot_mapping.data_ptr(),
        write.scale_at if k_scale is None else k_scale.data_ptr(),
        write.scale_at if v_scale is None else v_scale.data_ptr(),
        *write.tail,
    )


class _Write(NamedTuple):
    """What was checked once for all tensors that look alike.

    Attributes:
        kernel: None where there is nothing to write.
        mask: bits that no address of key, value and cache has, or each is checked by itself.
        tail: the kernel's arguments after the addresses.
        one: of an 8-bit cache, the scale that is not given.
        scale_at: the address of ``one``, 0 without one.
        spec: of the device.
    """

    kernel: Kernel | None
    mask: int
    tail: tuple[int, ...]
    one: torch.Tensor | None
    scale_at: int
    spec: DeviceSpec


# A step of a new number of tokens has an entry of its own for each kind of layer.
MAX_CHECKED = 1024
CHECKED: dict[tuple[object, ...], _Write] = {}


def _checked(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> _Write:
    spec = DeviceSpec.of(kv_cache.device)
    problem = _checked_problem(key, value, kv_cache, slot_mapping, spec)
    if len(slot_mapping) == 0:
        return _Write(None, 0, (), None, 0, spec)
    check_current_device(kv_cache)
    scales = checked_scales(k_scale, v_scale, problem, kv_cache.device)
    tail = (
        len(slot_mapping),
        kv_cache.shape[0] * kv_cache.shape[2],
        *kernel_strides("key", key, spec),
        *kernel_strides("value", value, spec),
        *kernel_strides("kv_cache", kv_cache, spec),
    )
    one = next((made for made, given in zip(scales, (k_scale, v_scale), strict=True) if made is not given), None)
    return _Write(
        kernel=KERNELS.get(cache_write_key(problem, spec)),
        mask=address_mask((key, value, kv_cache), spec),
        tail=tail,
        one=one,
        scale_at=0 if one is None else one.data_ptr(),
        spec=spec,
    )


def cache_write_key(problem: AttentionProblem, device: DeviceSpec) -> KernelKey:
    """Of the kernel of a ``cache_write_problem``."""
    return KernelKey("cache_write", problem, default_cache_write_config(problem), device)


def cache_write_problem(attention_problem: AttentionProblem) -> AttentionProblem:
    """The problem that the cache write is compiled for: what of an attention problem it depends on.

    Layers that differ in query heads or in masking share one kernel.
    """
    return _write_problem(
        attention_problem.num_kv_heads,
        attention_problem.head_dim,
        attention_problem.dtype,
        attention_problem.kv_dtype,
        attention_problem.page_size,
    )


@functools.lru_cache(maxsize=256)
def _write_problem(
    num_kv_heads: int, head_dim: int, dtype: str, kv_dtype: str, page_size: int | None
) -> AttentionProblem:
    return AttentionProblem(
        num_q_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,
        kv_dtype=kv_dtype,
        out_dtype=dtype,
        page_size=page_size,
    )


def _checked_problem(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, spec: DeviceSpec
) -> AttentionProblem:
    check_shape("kv_cache", kv_cache, (None, None, None, None), "[num_blocks, HK, block_size, 2 * D]")
    _, num_kv_heads, page_size, width = kv_cache.shape
    check_index("slot_mapping", slot_mapping, torch.int64, 1, kv_cache.device)
    quantized = dtype_name(kv_cache.dtype) in FLOAT8_DTYPES
    for name, tensor in (("key", key), ("value", value)):
        check_shape(name, tensor, (None, num_kv_heads, width // 2), "[>= n, HK, D]")
        check_device(name, tensor, kv_cache.device)
        require(
            tensor.dtype == (key.dtype if quantized else kv_cache.dtype),
            f"{name} dtype",
            value=dtype_name(tensor.dtype),
            limit=f"key has {dtype_name(key.dtype)}, the cache {dtype_name(kv_cache.dtype)}",
            remedy="Pass key and value in one dtype, and in that of a cache which is not 8-bit.",
        )
        require(
            len(tensor) >= len(slot_mapping),
            f"{name} rows",
            value=len(tensor),
            limit=f"slot_mapping has {len(slot_mapping)}",
            remedy="Pass one row for each slot.",
        )
    problem = _write_problem(num_kv_heads, width // 2, dtype_name(key.dtype), dtype_name(kv_cache.dtype), page_size)
    check_supported(problem, spec)
    return problem
