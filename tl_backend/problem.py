"""What is fixed when a kernel is compiled. One compiled kernel serves one problem for every batch.

Pure Python: no torch, no TileLang, no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

from tl_backend.errors import InvalidInputError, UnsupportedError, describe

# Multiples of 16, and the one above 256 that models have (Gemma 4's global layers).
SUPPORTED_HEAD_DIMS = (*range(32, 257, 16), 512)
PAGE_SIZE_STEP = 16
DTYPES = ("float16", "bfloat16", "float32")
FLOAT8_DTYPES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
# Kernels add the window to positions in int32.
MAX_WINDOW = 2**30
# Kernels divide by the cap, and subtract from it what is nearly as large: a logit's error is the cap's last digit in
# float32, 7e-4 at the upper end. Models have 30 to 50.
MIN_SOFT_CAP, MAX_SOFT_CAP = 1e-30, 1e4


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """The static side of one attention layer.

    Comes from the layer, never from the KV-cache group: a group can mix windows and head counts.

    Attributes:
        num_q_heads: query heads on this rank.
        num_kv_heads: key/value heads on this rank; divides ``num_q_heads``.
        head_dim: elements of a query and key head, one of ``SUPPORTED_HEAD_DIMS``.
        head_dim_v: elements of a value head; must equal ``head_dim``.
        dtype: of queries, "float16", "bfloat16" or "float32".
        kv_dtype: of keys and values: ``dtype``, or in a cache an 8-bit float, whose scales are read on the device at
            each launch.
        out_dtype: of the output; must equal ``dtype``.
        page_size: tokens in a KV-cache block, a multiple of 16; None where keys and values are no cache, but two
            contiguous tensors with the rows of one request after another.
        causal: bottom-right aligned causal mask.
        window: sliding window W: a causal query at position p attends to keys p - W + 1 ... p, a non-causal one to
            p - W + 1 ... p + W - 1. At most ``MAX_WINDOW``; None for all.
        soft_cap: logits become ``cap * tanh(logits / cap)``, before any mask. ``MIN_SOFT_CAP`` to ``MAX_SOFT_CAP``;
            None for none.
        sinks_dtype: one learned logit of this dtype a head joins the softmax's denominator. None for none.
        has_alibi: one slope a head times the distance of key and query joins the logits.
        returns_lse: the log-sum-exp of each row is written, too; compiled apart, so that it costs the others nothing.

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
    page_size: int | None
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    sinks_dtype: str | None = None
    has_alibi: bool = False
    returns_lse: bool = False

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_q_heads < 1 or self.num_q_heads % self.num_kv_heads:
            raise InvalidInputError(
                describe(
                    "head counts",
                    value=f"{self.num_q_heads} q heads, {self.num_kv_heads} kv heads",
                    limit="at least one of each, and q heads a multiple of kv heads",
                    remedy="Check the model's config, and that the tensor-parallel size divides both.",
                )
            )
        for message in _refusals(self):
            raise UnsupportedError(message)

    @property
    def is_quantized(self) -> bool:
        """Whether the cache holds 8-bit floats with a scale for keys and one for values."""
        return self.kv_dtype in FLOAT8_DTYPES

    @property
    def is_paged(self) -> bool:
        """Whether keys and values lie in the blocks of a cache."""
        return self.page_size is not None

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
        limit="multiples of 16 from 32 to 256, and 512, are supported",
        remedy="Serve this model with another attention backend.",
    )


def page_size_refusal(page_size: int | None) -> str | None:
    """Why no kernel serves this page size, or None."""
    if page_size is None or (page_size > 0 and page_size % PAGE_SIZE_STEP == 0):
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


_DTYPE_FIELDS = {  # What a message calls it, and its remedy.
    "kv_dtype": ("KV-cache dtype", "Pass --kv-cache-dtype auto."),
    "k": ("dtype of keys and values", "Convert them: only a cache may be 8-bit."),
    "out_dtype": ("output dtype", "Pass an output of that dtype, or none."),
}


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
        if value != problem.dtype and not (field == "kv_dtype" and problem.is_paged and problem.is_quantized):
            subject, remedy = _DTYPE_FIELDS[field if problem.is_paged or field == "out_dtype" else "k"]
            limit = f"it must equal the query dtype, {problem.dtype}"
            found.append(describe(subject, value=value, limit=limit, remedy=remedy))
    if problem.window is not None and not 1 <= problem.window <= MAX_WINDOW:
        limit = f"at least 1 key and at most {MAX_WINDOW}"
        found.append(describe("sliding window", value=problem.window, limit=limit, remedy="Pass None for no window."))
    if problem.soft_cap is not None and not MIN_SOFT_CAP <= problem.soft_cap <= MAX_SOFT_CAP:
        limit = f"it must be positive and finite, {MIN_SOFT_CAP:g} to {MAX_SOFT_CAP:g}"
        found.append(describe("logits soft cap", value=problem.soft_cap, limit=limit, remedy="Pass None for no cap."))
    if problem.sinks_dtype not in (None, *DTYPES):
        limit = f"{', '.join(DTYPES)} are supported"
        found.append(describe("sinks dtype", value=problem.sinks_dtype, limit=limit, remedy="Pass sinks.float()."))
    return [message for message in found if message is not None]
