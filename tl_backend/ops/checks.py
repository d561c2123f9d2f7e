"""Checks of what callers pass in, and the strides that kernels take. A failure is one message."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch

from tl_backend.device import DeviceSpec
from tl_backend.errors import InvalidInputError, UnsupportedError, describe
from tl_backend.problem import AttentionProblem

STRIDE_UNIT = 8  # Elements that strides are counted in on a GPU, as in ``kernels.dialect``.
VECTOR_BYTES = 16  # Every row begins at a multiple there.


def dtype_name(dtype: torch.dtype) -> str:
    """The name that problems use: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def require(condition: bool, subject: str, *, value: object, limit: str, remedy: str) -> None:
    """Raise InvalidInputError unless ``condition``."""
    if not condition:
        raise InvalidInputError(describe(subject, value=value, limit=limit, remedy=remedy))


def unsupported_reason(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Why kernels on ``device`` do not serve ``problem``, or None. Beyond what ``AttentionProblem`` itself refuses."""
    if problem.dtype in device.dtypes:
        if device.vendor != "cpu" or problem.sinks_dtype != "bfloat16":
            return None
        limit = "the C compiler has no bfloat16"
        return describe(f"sinks dtype on {device.name}", value="bfloat16", limit=limit, remedy="Pass sinks.float().")
    remedy = "Pass --dtype float32." if device.vendor == "cpu" else "Pass --dtype bfloat16."
    return describe(
        f"dtype on {device.name}",
        value=problem.dtype,
        limit=f"dtypes that run there: {', '.join(device.dtypes)}",
        remedy=remedy,
    )


def check_supported(problem: AttentionProblem, device: DeviceSpec) -> None:
    """Raises UnsupportedError with ``unsupported_reason``."""
    if (reason := unsupported_reason(problem, device)) is not None:
        raise UnsupportedError(reason)


def check_index(name: str, tensor: torch.Tensor, dtype: torch.dtype, ndim: int, device: torch.device) -> None:
    """An index tensor: dtype, number of dimensions, device, dense last dimension."""
    require(
        tensor.dtype == dtype and tensor.dim() == ndim,
        name,
        value=f"{dtype_name(tensor.dtype)} {list(tensor.shape)}",
        limit=f"{dtype_name(dtype)} with {ndim} dimension{'s' * (ndim > 1)} is needed",
        remedy=f"Pass {name}.to(torch.{dtype_name(dtype)}).",
    )
    check_device(name, tensor, device)
    require(
        tensor.numel() == 0 or tensor.shape[-1] == 1 or tensor.stride(-1) == 1,
        f"{name} strides",
        value=tensor.stride(),
        limit="the last dimension must be dense",
        remedy=f"Pass {name}.contiguous().",
    )


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """The tensor is where the KV cache is."""
    require(
        tensor.device == device,
        f"{name} device",
        value=tensor.device,
        limit=f"all tensors must be on {device}, as the KV cache is",
        remedy=f"Pass {name}.to('{device}').",
    )


def check_current_device(tensor: torch.Tensor) -> None:
    """Kernels launch on the current device: on tensors of another one they would run in the wrong place."""
    current = torch.cuda.current_device() if tensor.is_cuda else None
    if tensor.device.index in (None, current):  # At every launch: the message is made only if it is needed.
        return
    require(
        False,
        "device",
        value=tensor.device,
        limit=f"kernels launch on the current device, {current}",
        remedy=f"Call torch.cuda.set_device({tensor.device.index}) before the first kernel of the process is compiled.",
    )


def check_written(name: str, tensor: torch.Tensor) -> None:
    """No two elements of a result lie in one place, as those of an expanded tensor do."""
    require(
        all(step or extent <= 1 for extent, step in zip(tensor.shape, tensor.stride(), strict=True)),
        f"{name} strides",
        value=tensor.stride(),
        limit=f"every element of shape {list(tensor.shape)} needs a place of its own",
        remedy=f"Pass {name}.contiguous().",
    )


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], meaning: str) -> None:
    """``None`` in ``shape`` stands for any extent."""
    fits = tensor.dim() == len(shape) and all(w is None or w == g for w, g in zip(shape, tensor.shape, strict=True))
    require(
        fits,
        f"{name} shape",
        value=list(tensor.shape),
        limit=f"{meaning} = {['any' if w is None else w for w in shape]} is needed",
        remedy="Check the head counts and the head size.",
    )


def kernel_strides(name: str, tensor: torch.Tensor, device: DeviceSpec) -> tuple[int, ...]:
    """The strides of all dimensions but the last, in the kernels' units (see ``kernels.dialect``).

    A dimension of extent 1 has no meaningful stride and can carry any: it gets the dense one.

    Raises:
        InvalidInputError: the last dimension is not dense, or a stride or the address is not a multiple of 16 bytes.
    """
    unit, step = STRIDE_UNIT if device.is_gpu else 1, _step(tensor, device)
    strides = _dense_where_free(tensor.shape, tensor.stride(), unit, step // tensor.element_size())
    if strides is None or tensor.data_ptr() % step:
        raise InvalidInputError(
            describe(
                f"{name} strides",
                value=f"{tensor.stride()} for shape {list(tensor.shape)}, address % {step} = "
                f"{tensor.data_ptr() % step}",
                limit=f"a dense last dimension, and rows every {step} bytes, are needed",
                remedy=f"Pass {name}.contiguous(), or pad the rows of the buffer it is a view of.",
            )
        )
    return strides


def address_mask(tensors: Iterable[torch.Tensor], device: DeviceSpec) -> int:
    """Bits that are 0 in the addresses of tensors like these, if all lie at multiples of the largest step of one."""
    return max(_step(tensor, device) for tensor in tensors) - 1


def _step(tensor: torch.Tensor, device: DeviceSpec) -> int:
    """Bytes, a power of two, that rows and addresses are multiples of."""
    if not device.is_gpu:
        return tensor.element_size()
    # Of 8-bit elements a unit is half of what TMA, which Hopper's prefill reads them with, can step.
    return max(STRIDE_UNIT * tensor.element_size(), VECTOR_BYTES)


class Strides(NamedTuple):
    """Strides of one launch, in the kernels' units but for the last two, which are in elements.

    Attributes:
        q, out: of rows and heads.
        k: of the cache's blocks, heads and slots; of contiguous keys rows, heads and nothing.
        v: of contiguous values' rows and heads; nothing for a cache.
        block_table: of requests.
        lse: of heads.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    out: tuple[int, ...]
    block_table: int
    lse: int


@functools.lru_cache(maxsize=1024)
def _dense_where_free(
    shape: tuple[int, ...], stride: tuple[int, ...], unit: int, multiple: int
) -> tuple[int, ...] | None:
    """Strides but the last in units, dense where the extent is 1; None if one is no ``multiple`` of elements."""
    strides, dense = [], shape[-1]
    for extent, step in zip(reversed(shape[:-1]), reversed(stride[:-1]), strict=True):
        strides.append(dense if extent <= 1 else step)
        dense *= max(extent, 1)
    if stride[-1] != 1 or any(step % multiple for step in strides):
        return None
    return tuple(step // unit for step in reversed(strides))


def checked_scales(
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, problem: AttentionProblem, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The scales of an 8-bit cache, 1 where not given; None for other caches, which take none."""
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    for name, scale in scales.items():
        if scale is not None:
            require(
                problem.is_quantized,
                name,
                value=list(scale.shape),
                limit=f"a cache of {problem.kv_dtype} has no scales",
                remedy=f"Leave {name} out.",
            )
            require(
                scale.dtype == torch.float32 and scale.numel() == 1,
                name,
                value=f"{dtype_name(scale.dtype)} {list(scale.shape)}",
                limit="one float32 is needed",
                remedy=f"Pass {name}.float().reshape(1).",
            )
            check_device(name, scale, device)
        elif problem.is_quantized:
            scales[name] = torch.ones(1, dtype=torch.float32, device=device)
    return scales["k_scale"], scales["v_scale"]
