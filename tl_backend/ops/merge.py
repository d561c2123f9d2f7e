"""The public merge of two partial attentions."""

from __future__ import annotations

import torch

from tl_backend.device import DeviceSpec
from tl_backend.ops.checks import (
    check_current_device,
    check_device,
    check_index,
    check_shape,
    check_supported,
    check_written,
    dtype_name,
    kernel_strides,
    require,
)
from tl_backend.ops.compiled import KERNELS, KernelKey
from tl_backend.problem import AttentionProblem
from tl_backend.telemetry import launches

THREADS = 128


def merge_attention(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention over the keys of both, from attentions of the same queries over disjoint keys.

    Where one has log-sum-exp -inf, it had no keys, and its output is not used; where both have, the result is 0 and
    -inf. Neither syncs nor allocates (but for ``out``).

    Args:
        out_a, out_b: ``[T, H, D]``, float16 or bfloat16 on a GPU, float32 on a CPU; rows may be strided.
        lse_a, lse_b: float32 ``[H, T]``, natural logarithm, as ``paged_attention`` writes it.
        out: ``[T, H, D]``, dtype of out_a; made if not given. May be ``out_a`` or ``out_b``.
        lse: float32 ``[H, T]``: the log-sum-exp over all keys is written there. Neither ``lse_a`` nor ``lse_b``.

    Returns:
        ``out``.

    Raises:
        InvalidInputError: an argument is malformed.
        UnsupportedError: no kernel serves the request.
        EnvironmentProblemError: the kernel cannot be compiled here.
    """
    if out is None:
        out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    spec = DeviceSpec.of(out_a.device)
    problem = _checked_problem(out_a, lse_a, out_b, lse_b, out, lse, spec)
    if out_a.shape[0] == 0:
        return out
    check_current_device(out_a)
    kernel = KERNELS.get(KernelKey("merge", problem, THREADS, spec))
    launches.record("merge")
    kernel(
        out_a.data_ptr(),
        lse_a.data_ptr(),
        out_b.data_ptr(),
        lse_b.data_ptr(),
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        out_a.shape[0],
        *kernel_strides("out_a", out_a, spec),
        *kernel_strides("out_b", out_b, spec),
        *kernel_strides("out", out, spec),
        lse_a.stride(0),
        lse_b.stride(0),
        0 if lse is None else lse.stride(0),
    )
    return out


def merge_key(problem: AttentionProblem, device: DeviceSpec) -> KernelKey:
    """Of the kernel that merges outputs of a problem: neither its keys nor its scores matter."""
    merged = _merge_problem(problem.num_q_heads, problem.head_dim, problem.dtype, returns_lse=problem.returns_lse)
    return KernelKey("merge", merged, THREADS, device)


def _merge_problem(num_heads: int, head_dim: int, dtype: str, *, returns_lse: bool) -> AttentionProblem:
    return AttentionProblem(
        num_q_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,
        kv_dtype=dtype,
        out_dtype=dtype,
        page_size=None,
        returns_lse=returns_lse,
    )


def _checked_problem(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    spec: DeviceSpec,
) -> AttentionProblem:
    check_shape("out_a", out_a, (None, None, None), "[T, H, D]")
    num_rows, num_heads, head_dim = out_a.shape
    for name, tensor in (("out_b", out_b), ("out", out)):
        check_shape(name, tensor, tuple(out_a.shape), "[T, H, D]")
        check_device(name, tensor, out_a.device)
        require(
            tensor.dtype == out_a.dtype,
            f"{name} dtype",
            value=dtype_name(tensor.dtype),
            limit=f"out_a has {dtype_name(out_a.dtype)}",
            remedy=f"Pass {name}.to(torch.{dtype_name(out_a.dtype)}).",
        )
    for name, vector in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        if vector is not None:
            check_shape(name, vector, (num_heads, num_rows), "[H, T]")
            check_index(name, vector, torch.float32, 2, out_a.device)
    require(
        lse is None or num_rows == 0 or lse.data_ptr() not in (lse_a.data_ptr(), lse_b.data_ptr()),
        "lse",
        value="lse_a or lse_b",
        limit="every head reads both while others write lse",
        remedy="Pass a tensor of its own.",
    )
    check_written("out", out)
    if lse is not None:
        check_written("lse", lse)
    problem = _merge_problem(num_heads, head_dim, dtype_name(out_a.dtype), returns_lse=lse is not None)
    check_supported(problem, spec)
    return problem
