"""The public attention operation over a paged KV cache."""

from __future__ import annotations

import math
from typing import Any

import torch

from tl_backend.device import DeviceSpec
from tl_backend.ops.checks import (
    check_current_device,
    check_device,
    check_index,
    check_shape,
    check_supported,
    check_written,
    checked_scales,
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


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
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
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    num_splits: int | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Attention of varlen queries over a paged KV cache, with grouped kv heads.

    Query token i of a request with n query tokens and s keys sits at position s - n + i (bottom-right alignment) and,
    with ``causal``, attends to keys 0 ... s - n + i. Keys at or past s are never used, whatever their slots hold, and
    block-table entries past ceil(s / block_size) are never read.

    With a plan the call neither syncs nor allocates (but for ``out``), and trusts its arguments: the tensors must be
    those that the plan was made for, or others of the same shapes, dtypes and device. What it checks it checks once for
    all layers of a plan whose tensors look alike. Without a plan it makes its own, for which it copies ``cu_seqlens_q``
    to the host, and checks everything.

    Args:
        q: ``[T, H, D]``, float16 or bfloat16 on a GPU, float32 on a CPU. Rows may be strided (a view of a fused qkv
            buffer); on a GPU every row and head must start at a multiple of 16 bytes.
        kv_cache: ``[num_blocks, HK, block_size, 2 * D]``, dtype of q or an 8-bit float, any strides but a dense last
            dimension. The first D of the last dimension are the key, the others the value. With a plan for an 8-bit
            cache also its bytes, as uint8.
        block_table: int32 ``[R, max_blocks]``: blocks of each request, in order.
        cu_seqlens_q: int32 ``[R + 1]``: first query row of each request, and their end.
        seq_lens: int32 ``[R]``: keys of each request, its new tokens included.
        max_seqlen_q: longest query of the batch, or an upper bound.
        max_seqlen_k: longest sequence of the batch, or an upper bound.
        out: ``[T, H, D]``, dtype of q; made if not given. Rows past ``cu_seqlens_q[-1]`` and rows without keys become
            zero.
        softmax_scale: of the logits, positive; ``D ** -0.5`` if not given.
        causal: True or False. A tensor (one bool a request) is not supported yet.
        window: W keys, the token's own among them: a causal query at position p attends to p - W + 1 ... p, a
            non-causal one to p - W + 1 ... p + W - 1.
        soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``, before ALiBi and masks; 1e-30 to 1e4.
        sinks: ``[H]``, any dtype of a query: a logit that joins each softmax's denominator. Read at launch.
        alibi_slopes: float32 ``[H]``: slope times (key - query) joins the logits, minus its magnitude if not causal.
        k_scale, v_scale: float32, one element, on the device, for an 8-bit cache: what its keys and values are
            multiplied with. 1 if not given; needed with a plan.
        lse: float32 ``[H, T]``: the natural logarithm of each softmax's denominator is written there, -inf for a row
            without keys, or its sink.
        q_scale, out_scale: not supported yet.
        num_splits: a cap on the pieces that one decode request's keys are cut into; 1 for none. Not with a plan, which
            has chosen already.
        plan: of this step, from ``plan_attention``.

    Returns:
        ``out``.

    Raises:
        InvalidInputError: an argument is malformed.
        UnsupportedError: no kernel serves the request.
        EnvironmentProblemError: the kernels cannot be compiled here.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    extras = (lse, sinks, alibi_slopes, k_scale, v_scale)
    if plan is None:
        refuse_what_is_not_there(causal, {"q_scale": q_scale, "out_scale": out_scale})
        spec = DeviceSpec.of(kv_cache.device)
        problem = _checked_problem(
            q, kv_cache, block_table, cu_seqlens_q, seq_lens, out, spec,
            causal=bool(causal), window=window, soft_cap=soft_cap,
            sinks_dtype=None if sinks is None else dtype_name(sinks.dtype),
            has_alibi=alibi_slopes is not None, returns_lse=lse is not None,
        )  # fmt: skip
        check_extras(q, sinks, alibi_slopes, lse)
        extras = (lse, sinks, alibi_slopes, *checked_scales(k_scale, v_scale, problem, q.device))
        if lse is not None:
            lse.fill_(-math.inf)  # Rows that belong to no request have no keys.
        if q.shape[0] == 0 or len(seq_lens) == 0:
            return out.zero_()
        _check_pages(block_table, seq_lens, kv_cache)
        starts = cu_seqlens_q.cpu()
        plan = plan_attention(
            problem,
            cu_seqlens_q,
            seq_lens,
            cu_seqlens_q_cpu=checked_starts("cu_seqlens_q", starts, q.shape[0], max_seqlen_q, "max_seqlen_q"),
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            workspace=AttentionWorkspace(
                problem, q.device, max_num_reqs=len(seq_lens), max_num_tokens=max(int(starts[-1]), 1)
            ),
            num_splits=num_splits,
        )
        check_current_device(q)
        fresh = _layer(plan, q, kv_cache, out, block_table, cu_seqlens_q, seq_lens, softmax_scale, lse)
        return fresh.launch(q, kv_cache, kv_cache, out, *extras)
    # All that the checks and the layer's constants depend on. Step tensors by identity: the layer keeps them.
    looks = (
        q.shape, q.stride(), q.dtype, out.shape, out.stride(), out.dtype,
        kv_cache.shape, kv_cache.stride(), kv_cache.dtype,
        id(block_table), id(cu_seqlens_q), id(seq_lens),
        softmax_scale, causal, window, soft_cap, num_splits, q_scale is None, out_scale is None,
        None if lse is None else lse.stride(), sinks is None, alibi_slopes is None, k_scale is None, v_scale is None,
    )  # fmt: skip
    layer = plan.layers.get(looks)
    if layer is None:
        refuse_what_is_not_there(causal, {"q_scale": q_scale, "out_scale": out_scale})
        require(
            num_splits is None,
            "num_splits",
            value=num_splits,
            limit="a plan has chosen already",
            remedy="Pass num_splits to plan_attention.",
        )
        check_asked(plan.problem, causal, window, soft_cap)
        check_shapes_match_plan(plan, q, out, kv_cache)
        check_given_match_plan(
            plan.problem, sinks=sinks, alibi_slopes=alibi_slopes, lse=lse, k_scale=k_scale, v_scale=v_scale
        )
        layer = _layer(plan, q, kv_cache, out, block_table, cu_seqlens_q, seq_lens, softmax_scale, lse)
        plan.keep(looks, layer)
    return layer.launch(q, kv_cache, kv_cache, out, *extras)


def _layer(
    plan: AttentionPlan,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float | None,
    lse: torch.Tensor | None,
) -> Layer:
    return make_layer(
        plan.decode,
        plan.prefill,
        plan.num_rows,
        {"q": q, "kv_cache": kv_cache, "out": out},
        (block_table, cu_seqlens_q, seq_lens),
        checked_scale(softmax_scale, q.shape[2]),
        lse,
        DeviceSpec.of(kv_cache.device),
    )


def _checked_problem(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    spec: DeviceSpec,
    **features: Any,
) -> AttentionProblem:
    check_shape("q", q, (None, None, None), "[T, H, D]")
    check_shape("kv_cache", kv_cache, (None, None, None, 2 * q.shape[2]), "[num_blocks, HK, block_size, 2 * D]")
    check_shape("out", out, tuple(q.shape), "[T, H, D]")
    check_written("out", out)
    check_index("block_table", block_table, torch.int32, 2, kv_cache.device)
    check_index("cu_seqlens_q", cu_seqlens_q, torch.int32, 1, kv_cache.device)
    check_index("seq_lens", seq_lens, torch.int32, 1, kv_cache.device)
    check_device("q", q, kv_cache.device)
    check_device("out", out, kv_cache.device)
    num_reqs = len(seq_lens)
    check_shape("block_table", block_table, (num_reqs, None), "[R, max_blocks]")
    check_shape("cu_seqlens_q", cu_seqlens_q, (num_reqs + 1,), "[R + 1]")
    problem = AttentionProblem(
        num_q_heads=q.shape[1],
        num_kv_heads=kv_cache.shape[1],
        head_dim=q.shape[2],
        head_dim_v=q.shape[2],
        dtype=dtype_name(q.dtype),
        kv_dtype=dtype_name(kv_cache.dtype),
        out_dtype=dtype_name(out.dtype),
        page_size=kv_cache.shape[2],
        **features,
    )
    check_supported(problem, spec)
    return problem


def _check_pages(block_table: torch.Tensor, seq_lens: torch.Tensor, kv_cache: torch.Tensor) -> None:
    """Every key of every request lies in a block of the cache. Copies the lengths to the host."""
    num_blocks, page_size = kv_cache.shape[0], kv_cache.shape[2]
    lens, capacity = seq_lens.cpu(), block_table.shape[1] * page_size
    require(
        bool((lens >= 0).all()) and bool((lens <= capacity).all()),
        "seq_lens",
        value=f"{int(lens.min())} ... {int(lens.max())}",
        limit=f"0 ... {capacity}, which {block_table.shape[1]} blocks of {page_size} hold",
        remedy="Pass a block table with as many columns as the longest sequence has blocks.",
    )
    used = torch.arange(block_table.shape[1]) < -(-lens[:, None] // page_size)
    ids = block_table.cpu()[used]
    require(
        bool(((ids >= 0) & (ids < num_blocks)).all()),
        "block_table",
        value=f"{int(ids.min()) if len(ids) else 0} ... {int(ids.max()) if len(ids) else 0}",
        limit=f"blocks of a sequence are 0 ... {num_blocks - 1}",
        remedy="Check the block table against the cache.",
    )
