"""The class of a problem: what a table's row is held by, for the tuner and the runtime alike."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tl_backend.problem import AttentionProblem

# Tiles of the portable family have key counts that divide this, so that pages of one gcd with it are cut in the same
# way. Hopper's tiles of other counts are cut in boxes of that gcd, or in larger ones where a page allows it.
MAX_TILE_KEYS = 128
# Upper bounds of the classes of windows: what is near one tile, a few tiles, or as long as a context.
WINDOWS = (256, 1024, 4096)


@dataclass(frozen=True, kw_only=True)
class ProblemKey:
    """An ``AttentionProblem`` without what does not change its best config.

    Attributes:
        num_q_heads, num_kv_heads, head_dim, head_dim_v, dtype, kv_dtype, out_dtype, causal, returns_lse: as there.
        page: gcd of the page size and ``MAX_TILE_KEYS``; None for contiguous keys.
        window: upper bound of its class, 0 above the last; None for no window.
        soft_cap, sinks, alibi: whether there are any.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    kv_dtype: str
    out_dtype: str
    page: int | None
    causal: bool
    window: int | None
    soft_cap: bool
    sinks: bool
    alibi: bool
    returns_lse: bool

    @classmethod
    def of(cls, problem: AttentionProblem) -> ProblemKey:
        """The key of a problem."""
        window = problem.window
        return cls(
            num_q_heads=problem.num_q_heads,
            num_kv_heads=problem.num_kv_heads,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            dtype=problem.dtype,
            kv_dtype=problem.kv_dtype,
            out_dtype=problem.out_dtype,
            page=None if problem.page_size is None else gcd(problem.page_size, MAX_TILE_KEYS),
            causal=problem.causal,
            window=None if window is None else next((bound for bound in WINDOWS if window <= bound), 0),
            soft_cap=problem.soft_cap is not None,
            sinks=problem.sinks_dtype is not None,
            alibi=problem.has_alibi,
            returns_lse=problem.returns_lse,
        )

    def representative(self) -> AttentionProblem:
        """A problem of this class: to ask whether a config is legal for it, and to tune it.

        Raises:
            InvalidInputError, UnsupportedError: no problem has such a key.
        """
        return AttentionProblem(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            out_dtype=self.out_dtype,
            page_size=self.page,
            causal=self.causal,
            window=4 * WINDOWS[-1] if self.window == 0 else self.window,
            soft_cap=50.0 if self.soft_cap else None,
            sinks_dtype="bfloat16" if self.sinks else None,
            has_alibi=self.alibi,
            returns_lse=self.returns_lse,
        )

    def __str__(self) -> str:
        """For people: "32/8 D128 bfloat16 page 16 causal"."""
        words = [f"{self.num_q_heads}/{self.num_kv_heads}", f"D{self.head_dim}", self.dtype]
        if self.kv_dtype != self.dtype:
            words.append(f"kv {self.kv_dtype}")
        words.append("contiguous" if self.page is None else f"page {self.page}")
        words.append("causal" if self.causal else "full")
        if self.window is not None:
            words.append(f"window > {WINDOWS[-1]}" if self.window == 0 else f"window <= {self.window}")
        flags = {"soft cap": self.soft_cap, "sinks": self.sinks, "alibi": self.alibi, "lse": self.returns_lse}
        return " ".join(words + [flag for flag, there in flags.items() if there])
