"""The public matrix product: what measures a device's matmul ceiling."""

from __future__ import annotations

import torch

from tl_backend.configs.gemm import GemmConfig, GemmProblem, gemm_configs
from tl_backend.device import DeviceSpec
from tl_backend.errors import UnsupportedError, describe
from tl_backend.ops.checks import check_current_device, check_device, check_shape, dtype_name, require
from tl_backend.ops.compiled import KERNELS, KernelKey
from tl_backend.telemetry import launches


def gemm(
    a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None, config: GemmConfig | None = None
) -> torch.Tensor:
    """``a @ b.T``, summed in float32. Every shape is a kernel of its own.

    Args:
        a: ``[m, k]``, float16 or bfloat16 on a GPU, float32 on a CPU; contiguous.
        b: ``[n, k]``, as a.
        out: ``[m, n]``, as a; made if not given.
        config: of the kernel. Default: the first of ``gemm_configs``.

    Returns:
        ``out``.

    Raises:
        InvalidInputError: an argument is malformed.
        UnsupportedError: no kernel serves the dtype, or the config does not run on this device.
        EnvironmentProblemError: the kernel cannot be compiled here.
    """
    if out is None:
        out = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
    check_shape("a", a, (None, None), "[m, k]")
    check_shape("b", b, (None, a.shape[1]), "[n, k]")
    check_shape("out", out, (a.shape[0], b.shape[0]), "[m, n]")
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        check_device(name, tensor, a.device)
        require(
            tensor.dtype == a.dtype,
            f"{name} dtype",
            value=dtype_name(tensor.dtype),
            limit=f"a has {dtype_name(a.dtype)}",
            remedy=f"Pass {name}.to(torch.{dtype_name(a.dtype)}).",
        )
        require(
            tensor.is_contiguous() and tensor.data_ptr() % 16 == 0,
            f"{name} strides",
            value=f"{tensor.stride()} for shape {list(tensor.shape)}, address % 16 = {tensor.data_ptr() % 16}",
            limit="a dense matrix at a multiple of 16 bytes is needed",
            remedy=f"Pass {name}.clone(memory_format=torch.contiguous_format).",
        )
    spec = DeviceSpec.of(a.device)
    problem = GemmProblem(m=a.shape[0], n=b.shape[0], k=a.shape[1], dtype=dtype_name(a.dtype))
    key = gemm_key(problem, config or _default(problem, spec), spec)
    check_current_device(a)
    kernel = KERNELS.get(key)
    launches.record("gemm")
    kernel(a.data_ptr(), b.data_ptr(), out.data_ptr())
    return out


def gemm_key(problem: GemmProblem, config: GemmConfig, device: DeviceSpec) -> KernelKey:
    """Of the kernel of a config.

    Raises:
        UnsupportedError: no kernel serves the dtype there, or the config does not run there.
    """
    if problem.dtype not in device.dtypes:
        limit = f"dtypes that run there: {', '.join(device.dtypes)}"
        raise UnsupportedError(
            describe(f"matmul dtype on {device.name}", value=problem.dtype, limit=limit, remedy="Convert a and b.")
        )
    if (reason := config.illegal_reason(problem, device)) is not None:
        raise UnsupportedError(
            describe("matmul config", value=config, limit=reason, remedy="Pass one of gemm_configs.")
        )
    return KernelKey("gemm", problem, config, device)


def _default(problem: GemmProblem, device: DeviceSpec) -> GemmConfig:
    configs = gemm_configs(problem, device)
    if not configs:
        limit = f"no config fits {device.shared_memory_per_block} bytes of shared memory"
        raise UnsupportedError(
            describe(f"matmul on {device.name}", value=problem, limit=limit, remedy="Use torch's matmul.")
        )
    return configs[0]
