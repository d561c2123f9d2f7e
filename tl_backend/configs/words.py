"""A problem in one word, "32/8,D128,page16,bfloat16": what people type and what messages tell them to type."""

from __future__ import annotations

import re
from typing import Any

from tl_backend.errors import InvalidInputError, describe
from tl_backend.problem import AttentionProblem

GRAMMAR = (
    "Q/KV,D<head size>,page<tokens>|contiguous,<dtype>[,kv=<dtype>][,window=<keys>][,cap=<logit>][,sinks[=<dtype>]]"
    "[,alibi][,full][,lse]"
)
EXAMPLE = "32/8,D128,page16,bfloat16"
SINKS_DTYPE = "bfloat16"  # Of models with sinks.
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def parse_problem(spec: str) -> AttentionProblem:
    """The problem that a word of ``GRAMMAR`` means.

    Raises:
        InvalidInputError: the word is malformed, or two words of one kind contradict each other.
        UnsupportedError: no kernel serves the problem.
    """
    fields: dict[str, Any] = {}
    for word in spec.split(","):
        for field, value in _meaning(word.strip(), spec).items():
            if field in fields:
                raise _malformed(spec, f"it says {field} twice")
            fields[field] = value
    for field, example in (
        ("num_q_heads", "32/8"),
        ("head_dim", "D128"),
        ("page_size", "page16"),
        ("dtype", "bfloat16"),
    ):
        if field not in fields:
            raise _malformed(spec, f"it has no {field}, such as {example}")
    return AttentionProblem(
        **{"kv_dtype": fields["dtype"], **fields}, head_dim_v=fields["head_dim"], out_dtype=fields["dtype"]
    )


def format_problem(problem: AttentionProblem) -> str:
    """The word for a problem: ``parse_problem`` of it is the problem again."""
    words = {
        f"{problem.num_q_heads}/{problem.num_kv_heads}": True,
        f"D{problem.head_dim}": True,
        f"page{problem.page_size}" if problem.is_paged else "contiguous": True,
        problem.dtype: True,
        f"kv={problem.kv_dtype}": problem.kv_dtype != problem.dtype,
        f"window={problem.window}": problem.window is not None,
        f"cap={problem.soft_cap!r}": problem.soft_cap is not None,
        "sinks" if problem.sinks_dtype == SINKS_DTYPE else f"sinks={problem.sinks_dtype}": problem.sinks_dtype
        is not None,
        "alibi": problem.has_alibi,
        "full": not problem.causal,
        "lse": problem.returns_lse,
    }
    return ",".join(word for word, there in words.items() if there)


_WORDS: tuple[tuple[str, Any], ...] = (
    (r"(\d+)/(\d+)", lambda m: {"num_q_heads": int(m[1]), "num_kv_heads": int(m[2])}),
    (r"[Dd](\d+)", lambda m: {"head_dim": int(m[1])}),
    (r"page(\d+)", lambda m: {"page_size": int(m[1])}),
    (r"contiguous", lambda _: {"page_size": None}),
    (r"(float16|bfloat16|float32|bf16|fp16|fp32)", lambda m: {"dtype": _SHORT_DTYPES.get(m[1], m[1])}),
    (r"kv=(\w+)", lambda m: {"kv_dtype": _SHORT_DTYPES.get(m[1], m[1])}),
    (r"window=(\d+)", lambda m: {"window": int(m[1])}),
    (r"cap=([\d.]+(?:e[+-]?\d+)?)", lambda m: {"soft_cap": float(m[1])}),
    (r"sinks(?:=(\w+))?", lambda m: {"sinks_dtype": _SHORT_DTYPES.get(m[1], m[1]) if m[1] else SINKS_DTYPE}),
    (r"alibi", lambda _: {"has_alibi": True}),
    (r"full", lambda _: {"causal": False}),
    (r"causal", lambda _: {"causal": True}),
    (r"lse", lambda _: {"returns_lse": True}),
)


def _meaning(word: str, spec: str) -> dict[str, Any]:
    for pattern, fields in _WORDS:
        if match := re.fullmatch(pattern, word):
            try:
                return dict(fields(match))
            except ValueError:  # 1.2.3, or more digits than Python converts.
                break
    raise _malformed(spec, f"{word!r} is no word of it")


def _malformed(spec: str, why: str) -> InvalidInputError:
    return InvalidInputError(
        describe(
            "problem", value=f"{spec!r}, but {why}", limit=f"the form is {GRAMMAR}", remedy=f"An example: {EXAMPLE}."
        )
    )
