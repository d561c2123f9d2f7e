"""What the attention operations check of a step, whether its keys lie in pages or not. A failure is one message."""

from __future__ import annotations

from typing import Any

import torch

from tl_backend.errors import InvalidInputError, UnsupportedError, describe
from tl_backend.ops.checks import check_index, check_shape, check_written, dtype_name, require
from tl_backend.ops.plan import AttentionPlan
from tl_backend.problem import AttentionProblem

# Of the softmax scale: its product with log2(e) must stay a normal float32.
MIN_SCALE, MAX_SCALE = 1e-30, 1e30


def refuse_what_is_not_there(causal: bool | torch.Tensor, features: dict[str, Any]) -> None:
    """Raises UnsupportedError for a ``causal`` of many bools, and for features that are not None."""
    remedy = "Use another attention backend for this model."
    if isinstance(causal, torch.Tensor):
        raise UnsupportedError(describe("causal", value="a tensor", limit="one bool for the batch", remedy=remedy))
    for name, value in features.items():
        if value is not None:
            shown = list(value.shape) if isinstance(value, torch.Tensor) else value
            raise UnsupportedError(describe(name, value=shown, limit="no kernel has it yet", remedy=remedy))


def checked_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The softmax scale, ``head_dim ** -0.5`` if None."""
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    require(
        MIN_SCALE <= scale <= MAX_SCALE,
        "softmax_scale",
        value=softmax_scale,
        limit=f"{MIN_SCALE} to {MAX_SCALE}",
        remedy="Pass D ** -0.5, or leave it out.",
    )
    return scale


def check_extras(
    q: torch.Tensor, sinks: torch.Tensor | None, alibi_slopes: torch.Tensor | None, lse: torch.Tensor | None
) -> None:
    """Shapes, dtypes and device of what a problem's features add."""
    num_rows, num_heads = q.shape[:2]
    for name, tensor, shape, meaning in (
        ("sinks", sinks, (num_heads,), "[H]"),
        ("alibi_slopes", alibi_slopes, (num_heads,), "[H]"),
        ("lse", lse, (num_heads, num_rows), "[H, T]"),
    ):
        if tensor is None:
            continue
        check_shape(name, tensor, shape, meaning)
        dtype = tensor.dtype if name == "sinks" else torch.float32
        check_index(name, tensor, dtype, len(shape), q.device)
    if lse is not None:
        check_written("lse", lse)


def checked_starts(name: str, starts: torch.Tensor, num_rows: int, max_length: int, max_name: str) -> torch.Tensor:
    """``starts`` ``[R + 1]`` on the host: where the rows of each request start, and end."""
    lens = starts.diff()
    require(
        int(starts[0]) == 0 and bool((lens >= 0).all()) and int(starts[-1]) <= num_rows,
        name,
        value=f"{int(starts[0])} ... {int(starts[-1])}, shortest step {int(lens.min())}",
        limit=f"it must start at 0, never fall, and end at the {num_rows} rows or before",
        remedy="Check the lengths.",
    )
    require(
        int(lens.max()) <= max_length,
        max_name,
        value=max_length,
        limit=f"the longest request has {int(lens.max())} tokens",
        remedy="Pass the longest length, or an upper bound.",
    )
    return starts


def check_asked(
    problem: AttentionProblem, causal: bool | torch.Tensor, window: int | None, soft_cap: float | None
) -> None:
    """With a plan: ``causal`` is the plan's, and so are ``window`` and ``soft_cap`` where they are given."""
    planned = (problem.causal, problem.window, problem.soft_cap)
    asked = (causal, window or planned[1], soft_cap or planned[2])
    require(
        asked == planned,
        "causal, window, soft_cap",
        value=asked,
        limit=f"the plan was made for {planned}",
        remedy="Make the plan for the layer's problem, or leave window and soft_cap to it.",
    )


def check_shapes_match_plan(plan: AttentionPlan, q: torch.Tensor, out: torch.Tensor, keys: torch.Tensor) -> None:
    """With a plan: its kernels read tensors of the shapes and dtypes that its problem has.

    Args:
        keys: the cache, an 8-bit one also as the bytes that vLLM holds; or contiguous keys.
    """
    problem = plan.problem
    paged = keys.dim() == 4
    seen = (dtype_name(q.dtype), *q.shape[1:], keys.shape[1], keys.shape[2] if paged else None)
    planned = (problem.dtype, problem.num_q_heads, problem.head_dim, problem.num_kv_heads, problem.page_size)
    require(
        seen == planned and q.shape[0] >= plan.num_rows and out.shape == q.shape and out.dtype == q.dtype,
        "tensors",
        value=f"(dtype, H, D, HK, block_size) = {seen}, {q.shape[0]} rows, out {list(out.shape)} {out.dtype}",
        limit=f"the plan was made for {planned} and {plan.num_rows} rows",
        remedy="Make the plan for the layer's problem and the step.",
    )
    kv_dtype = dtype_name(keys.dtype)
    require(
        kv_dtype == problem.kv_dtype or (problem.is_quantized and kv_dtype == "uint8"),
        "dtype of keys and values",
        value=kv_dtype,
        limit=f"the plan was made for {problem.kv_dtype}",
        remedy="Make the plan for the layer's problem.",
    )


def check_given_match_plan(problem: AttentionProblem, **given: torch.Tensor | None) -> None:
    """With a plan: its kernels read exactly the tensors that its problem has."""
    has = {
        "sinks": problem.sinks_dtype is not None,
        "alibi_slopes": problem.has_alibi,
        "lse": problem.returns_lse,
        "k_scale": problem.is_quantized,
        "v_scale": problem.is_quantized,
    }
    for name, tensor in given.items():
        if (tensor is not None) != has[name]:
            raise InvalidInputError(
                describe(
                    name,
                    value="none" if tensor is None else list(tensor.shape),
                    limit=f"the plan was made for a problem {'with' if has[name] else 'without'} it",
                    remedy="Make the plan for the layer's problem.",
                )
            )
