"""The dynamic side of a launch, in buckets: what a table's row is measured for and looked up by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tl_backend.errors import InvalidInputError, describe

Phase = Literal["prefill", "extend", "decode", "verify"]
PHASES: tuple[Phase, ...] = get_args(Phase)

# Upper bounds of the buckets; a value above the last has None. Coarse on purpose: a lookup never leaves its bucket, so
# that each bucket has to be measured.
QUERY_LENS = (1, 16, 128, 1024)
CONTEXT_LENS = (1024, 4096, 16384)
REQUEST_COUNTS = (1, 8, 64)


@dataclass(frozen=True, kw_only=True, order=False)
class Regime:
    """Buckets of one launch.

    Attributes:
        phase: "prefill" (nothing cached), "extend" (new tokens behind cached ones), "decode" (one new token a request)
            or "verify" (a few, the same number in every request).
        query_len: new tokens of a request, on average: upper bound of the bucket, None above the last.
        context_len: keys of the longest request: upper bound, None above the last; 0 for a prefill, whose keys are its
            queries.
        num_requests: upper bound, None above the last.
    """

    phase: Phase
    query_len: int | None
    context_len: int | None
    num_requests: int | None

    def __post_init__(self) -> None:
        contexts = (0,) if self.phase == "prefill" else (*CONTEXT_LENS, None)
        queries = (1,) if self.phase == "decode" else (*QUERY_LENS, None)
        for subject, value, allowed in (
            ("phase of a regime", self.phase, PHASES),
            ("query_len of a regime", self.query_len, queries),
            ("context_len of a regime", self.context_len, contexts),
            ("num_requests of a regime", self.num_requests, (*REQUEST_COUNTS, None)),
        ):
            if value not in allowed:
                limit = f"one of {', '.join(map(str, allowed))}"
                raise InvalidInputError(describe(subject, value=value, limit=limit, remedy="Use Regime.of."))

    @classmethod
    def of(cls, *, phase: Phase, query_len: int, context_len: int, num_requests: int) -> Regime:
        """The regime of measured numbers: tokens, keys and requests."""
        return cls(
            phase=phase,
            query_len=1 if phase == "decode" else _bucket(query_len, QUERY_LENS),
            context_len=0 if phase == "prefill" else _bucket(context_len, CONTEXT_LENS),
            num_requests=_bucket(num_requests, REQUEST_COUNTS),
        )

    @property
    def kind(self) -> str:
        """The kernel that serves it: "decode" or "prefill"."""
        return "decode" if self.phase in ("decode", "verify") else "prefill"

    def __str__(self) -> str:
        """For people: "extend, queries <= 128, keys <= 4096, requests <= 8"."""
        parts: list[str] = [self.phase]
        if self.phase != "decode":
            parts.append(_bound("queries", self.query_len, QUERY_LENS))
        if self.phase != "prefill":
            parts.append(_bound("keys", self.context_len, CONTEXT_LENS))
        return ", ".join([*parts, _bound("requests", self.num_requests, REQUEST_COUNTS)])


def _bucket(value: int, bounds: tuple[int, ...]) -> int | None:
    return next((bound for bound in bounds if value <= bound), None)


def _bound(name: str, bound: int | None, bounds: tuple[int, ...]) -> str:
    return f"{name} > {bounds[-1]}" if bound is None else f"{name} <= {bound}"
