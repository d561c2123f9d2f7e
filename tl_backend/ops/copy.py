"""The public copy: what measures a device's memory ceiling."""

from __future__ import annotations

import torch

from tl_backend.configs.copy import WORD_BYTES, CopyConfig, CopyProblem, copy_configs
from tl_backend.device import DeviceSpec
from tl_backend.errors import UnsupportedError, describe
from tl_backend.ops.checks import STRIDE_UNIT, check_current_device, check_device, require
from tl_backend.ops.compiled import KERNELS, KernelKey
from tl_backend.telemetry import launches


def copy(source: torch.Tensor, target: torch.Tensor, *, config: CopyConfig | None = None) -> torch.Tensor:
    """Copy the bytes of one dense tensor to another.

    Args:
        source: any dtype and shape, contiguous, a multiple of 4 bytes.
        target: contiguous, as many bytes as source, on its device; must not overlap it.
        config: of the kernel. Default: the first of ``copy_configs``.

    Returns:
        ``target``.

    Raises:
        InvalidInputError: an argument is malformed.
        UnsupportedError: more bytes than blocks can be counted for.
        EnvironmentProblemError: the kernel cannot be compiled here.
    """
    num_bytes = source.numel() * source.element_size()
    for name, tensor in (("source", source), ("target", target)):
        check_device(name, tensor, source.device)
        found = tensor.numel() * tensor.element_size()
        require(
            tensor.is_contiguous() and tensor.data_ptr() % 16 == 0,
            f"{name} strides",
            value=f"{tensor.stride()} for shape {list(tensor.shape)}, address % 16 = {tensor.data_ptr() % 16}",
            limit="dense elements at a multiple of 16 bytes are needed",
            remedy=f"Pass {name}.clone(memory_format=torch.contiguous_format).",
        )
        require(
            found == num_bytes and found % WORD_BYTES == 0,
            f"{name} size",
            value=f"{found} bytes",
            limit=f"source has {num_bytes}, and a multiple of {WORD_BYTES} is copied",
            remedy="Pass tensors of one size in bytes, padded to whole words.",
        )
    spec = DeviceSpec.of(source.device)
    config = config or copy_configs(spec)[0]
    num_words = num_bytes // WORD_BYTES
    num_blocks = -(-num_words // config.words)
    if num_blocks >= 2**31:
        limit = f"{(2**31 - 1) * config.words * WORD_BYTES} bytes fit into one launch"
        raise UnsupportedError(describe("copy", value=f"{num_bytes} bytes", limit=limit, remedy="Copy it in parts."))
    if num_blocks:
        check_current_device(source)
        kernel = KERNELS.get(copy_key(config, spec))
        launches.record("copy")
        piece = config.words // (STRIDE_UNIT if spec.is_gpu else 1)
        kernel(source.data_ptr(), target.data_ptr(), num_words, num_blocks, piece)
    return target


def copy_key(config: CopyConfig, device: DeviceSpec) -> KernelKey:
    """Of the kernel of a config."""
    return KernelKey("copy", CopyProblem(), config, device)
