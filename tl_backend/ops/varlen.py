"""The public attention operation over contiguous keys and values."""

from __future__ import annotations

import math

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
    require,
)
from tl_backend.ops.layer import Layer, make_layer
from tl_backend.ops.plan import AttentionPlan, plan_attention
from tl_backend.ops.step_checks import (
    check_asked,
    check_extras,
    check_given_match_plan,
    check_shapes_match_plan,
    checked_scale,
    checked_starts,
    refuse_what_is_not_there,
)
from tl_backend.ops.workspace import AttentionWorkspace
from tl_backend.problem import AttentionProblem


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    out: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool | torch.Tensor = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Attention of varlen queries over varlen keys and values that lie in no cache, with grouped kv heads.

    For encoder layers (``causal=False``), and for the new tokens of a chunk apart from their context, whose result
    ``merge_attention`` joins. Query token i of a request with n query tokens and s keys sits at position s - n + i
    (bottom-right alignment).

    With a plan the call neither syncs nor allocates (but for ``out``), and trusts its arguments, as ``paged_attention``
    does. Without one it makes its own, for which it copies both ``cu_seqlens`` to the host, and checks everything.

    Args:
        q: ``[T, H, D]``, float16 or bfloat16 on a GPU, float32 on a CPU. Rows may be strided (a view of a fused qkv
            buffer); on a GPU every row and head must start at a multiple of 16 bytes. So, too, k and v.
        k, v: ``[S, HK, D]``, dtype of q.
        cu_seqlens_q: int32 ``[R + 1]``: first query row of each request, and their end.
        cu_seqlens_k: int32 ``[R + 1]``: first key row of each request, and their end.
        max_seqlen_q: longest query of the batch, or an upper bound.
        max_seqlen_k: most keys of a request, or an upper bound.
        out, softmax_scale, window, soft_cap, sinks, alibi_slopes, lse: as for ``paged_attention``.
        causal: whether a query attends only to keys at its position and before. A tensor is refused.
        plan: of this step, from ``plan_attention``, for a problem with ``page_size=None``.

    Returns:
        ``out``.

    Raises:
        InvalidInputError: an argument is malformed.
        UnsupportedError: no kernel serves the request.
        EnvironmentProblemError: the kernels cannot be compiled here.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    extras = (lse, sinks, alibi_slopes, None, None)
    if plan is None:
        refuse_what_is_not_there(causal, {})
        problem = _checked_problem(
            q, k, v, cu_seqlens_q, cu_seqlens_k, out, DeviceSpec.of(q.device),
            causal=bool(causal), window=window, soft_cap=soft_cap,
            sinks_dtype=None if sinks is None else dtype_name(sinks.dtype),
            has_alibi=alibi_slopes is not None, returns_lse=lse is not None,
        )  # fmt: skip
        check_extras(q, sinks, alibi_slopes, lse)
        if lse is not None:
            lse.fill_(-math.inf)  # Rows that belong to no request have no keys.
        num_reqs = len(cu_seqlens_q) - 1
        if q.shape[0] == 0 or num_reqs == 0:
            return out.zero_()
        starts = checked_starts("cu_seqlens_q", cu_seqlens_q.cpu(), q.shape[0], max_seqlen_q, "max_seqlen_q")
        keys = checked_starts("cu_seqlens_k", cu_seqlens_k.cpu(), k.shape[0], max_seqlen_k, "max_seqlen_k").diff()
        plan = plan_attention(
            problem,
            cu_seqlens_q,
            cu_seqlens_k,
            cu_seqlens_q_cpu=starts,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            workspace=AttentionWorkspace(
                problem, q.device, max_num_reqs=num_reqs, max_num_tokens=max(int(starts[-1]), 1)
            ),
            seq_lens_cpu_upper_bound=keys,
        )
        check_current_device(q)
        fresh = _layer(plan, q, k, v, out, cu_seqlens_q, cu_seqlens_k, softmax_scale, lse)
        return fresh.launch(q, k, v, out, *extras)
    looks = (  # As in ``paged_attention``.
        q.shape, q.stride(), q.dtype, out.shape, out.stride(), out.dtype,
        k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype,
        id(cu_seqlens_q), id(cu_seqlens_k), softmax_scale, causal, window, soft_cap,
        None if lse is None else lse.stride(), sinks is None, alibi_slopes is None,
    )  # fmt: skip
    layer = plan.layers.get(looks)
    if layer is None:
        refuse_what_is_not_there(causal, {})
        check_asked(plan.problem, causal, window, soft_cap)
        check_shapes_match_plan(plan, q, out, k)
        check_given_match_plan(plan.problem, sinks=sinks, alibi_slopes=alibi_slopes, lse=lse)
        layer = _layer(plan, q, k, v, out, cu_seqlens_q, cu_seqlens_k, softmax_scale, lse)
        plan.keep(looks, layer)
    return layer.launch(q, k, v, out, *extras)


def _layer(
    plan: AttentionPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float | None,
    lse: torch.Tensor | None,
) -> Layer:
    return make_layer(
        None,
        plan.prefill,
        plan.num_rows,
        {"q": q, "k": k, "v": v, "out": out},
        (cu_seqlens_k, cu_seqlens_q, cu_seqlens_k),
        checked_scale(softmax_scale, q.shape[2]),
        lse,
        DeviceSpec.of(q.device),
    )


def _checked_problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    out: torch.Tensor,
    spec: DeviceSpec,
    *,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    sinks_dtype: str | None,
    has_alibi: bool,
    returns_lse: bool,
) -> AttentionProblem:
    check_shape("q", q, (None, None, None), "[T, H, D]")
    check_shape("k", k, (None, None, q.shape[2]), "[S, HK, D]")
    check_shape("v", v, tuple(k.shape), "[S, HK, D]")
    check_shape("out", out, tuple(q.shape), "[T, H, D]")
    check_written("out", out)
    for name, tensor in (("k", k), ("v", v), ("out", out)):
        check_device(name, tensor, q.device)
    check_index("cu_seqlens_q", cu_seqlens_q, torch.int32, 1, q.device)
    check_index("cu_seqlens_k", cu_seqlens_k, torch.int32, 1, q.device)
    require(
        len(cu_seqlens_q) > 0,
        "cu_seqlens_q",
        value="no element",
        limit="[R + 1] elements are needed, of which the last says where the rows end",
        remedy="Pass one 0 for no request.",
    )
    check_shape("cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape), "[R + 1]")
    problem = AttentionProblem(
        num_q_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        head_dim_v=v.shape[2],
        dtype=dtype_name(q.dtype),
        kv_dtype=dtype_name(k.dtype),
        out_dtype=dtype_name(out.dtype),
        page_size=None,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        sinks_dtype=sinks_dtype,
        has_alibi=has_alibi,
        returns_lse=returns_lse,
    )
    require(
        v.dtype == k.dtype,
        "v dtype",
        value=dtype_name(v.dtype),
        limit=f"k has {dtype_name(k.dtype)}",
        remedy="Pass keys and values in one dtype.",
    )
    check_supported(problem, spec)
    return problem
