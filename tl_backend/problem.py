"""What is fixed when a kernel is compiled. One compiled kernel serves one problem for every batch.

Pure Python: no torch, no TileLang, no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

from tl_backend.errors import InvalidInputError, UnsupportedError, describe

HEAD_DIM_STEP = 16
MIN_HEAD_DIM = 32
MAX_HEAD_DIM = 256
PAGE_SIZE_STEP = 16
DTYPES = ("float16", "bfloat16", "float32")

SUPPORTED_HEAD_DIMS = tuple(range(MIN_HEAD_DIM, MAX_HEAD_DIM + 1, HEAD_DIM_STEP))


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """The static side of one attention layer.

    Comes from the layer, never from the KV-cache group: a group can mix windows and head counts.

    Attributes:
        num_q_heads: query heads on this rank.
        num_kv_heads: key/value heads on this rank; divides ``num_q_heads``.
        head_dim: elements of a query and key head, a multiple of 16 in 32..256.
        head_dim_v: elements of a value head; must equal ``head_dim``.
        dtype: of queries, "float16", "bfloat16" or "float32".
        kv_dtype: of the cache; must equal ``dtype``.
        out_dtype: of the output; must equal ``dtype``.
        page_size: tokens in a KV-cache block, a multiple of 16.
        causal: bottom-right aligned causal mask.
        window: sliding window in keys, itself included. Reserved: refused until a kernel has it.
        soft_cap: logits soft cap. Reserved.
        has_sinks: one learned logit a head in the denominator. Reserved.
        has_alibi: one slope a head. Reserved.

    Raises:
        InvalidInputError: a field is malformed.
        UnsupportedError: the problem is well-formed, but no kernel serves it.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    kv_dtype: str
    out_dtype: str
    page_size: int
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_q_heads % self.num_kv_heads:
            raise InvalidInputError(
                describe(
                    "head counts",
                    value=f"{self.num_q_heads} q heads, {self.num_kv_heads} kv heads",
                    limit="q heads must be a multiple of kv heads",
                    remedy="Check the model's config, and that the tensor-parallel size divides both.",
                )
            )
        for message in _refusals(self):
            raise UnsupportedError(message)

    @property
    def group_size(self) -> int:
        """Query heads that share one kv head (the GQA ratio)."""
        return self.num_q_heads // self.num_kv_heads


def head_dim_refusal(head_dim: int) -> str | None:
    """Why no kernel serves this head size, or None."""
    if head_dim in SUPPORTED_HEAD_DIMS:
        return None
    return describe(
        "head size",
        value=head_dim,
        limit=f"multiples of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM} are supported",
        remedy="Serve this model with another attention backend.",
    )


def page_size_refusal(page_size: int) -> str | None:
    """Why no kernel serves this page size, or None."""
    if page_size > 0 and page_size % PAGE_SIZE_STEP == 0:
        return None
    return describe(
        "page size",
        value=page_size,
        limit=f"positive multiples of {PAGE_SIZE_STEP} are supported",
        remedy="Pass --block-size 16 (or another multiple of 16).",
    )


def dtype_refusal(dtype: str) -> str | None:
    """Why no kernel serves this dtype, or None. Whether a given device serves it is for ``ops.support`` to say."""
    if dtype in DTYPES:
        return None
    return describe(
        "dtype",
        value=dtype,
        limit=f"{', '.join(DTYPES)} are supported",
        remedy="Pass --dtype bfloat16.",
    )


def _refusals(problem: AttentionProblem) -> list[str]:
    other = "Serve this model with another attention backend."
    found = [head_dim_refusal(problem.head_dim), page_size_refusal(problem.page_size), dtype_refusal(problem.dtype)]
    if problem.head_dim_v != problem.head_dim:
        found.append(
            describe(
                "value head size",
                value=problem.head_dim_v,
                limit=f"it must equal the key head size, {problem.head_dim}",
                remedy=other,
            )
        )
    for field in ("kv_dtype", "out_dtype"):
        value = getattr(problem, field)
        if value != problem.dtype:
            found.append(
                describe(
                    {"kv_dtype": "KV-cache dtype", "out_dtype": "output dtype"}[field],
                    value=value,
                    limit=f"it must equal the query dtype, {problem.dtype}",
                    remedy="Pass --kv-cache-dtype auto.",
                )
            )
    features = {
        "sliding window": problem.window,
        "logits soft cap": problem.soft_cap,
        "attention sinks": problem.has_sinks or None,
        "ALiBi": problem.has_alibi or None,
    }
    for feature, value in features.items():
        if value is not None:
            found.append(describe(feature, value=value, limit="no kernel has it yet", remedy=other))
    return [message for message in found if message is not None]
