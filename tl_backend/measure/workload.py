"""Workloads, and their tensors on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tl_backend.configs.choice import Chooser
from tl_backend.configs.tile import ELEMENT_BYTES
from tl_backend.errors import InvalidInputError, describe
from tl_backend.measure.timing import Launch
from tl_backend.ops import AttentionPlan, AttentionWorkspace, paged_attention, plan_attention, varlen_attention
from tl_backend.ops.reference import paged_attention_reference, varlen_attention_reference
from tl_backend.problem import AttentionProblem

# Of an 8-bit cache: random keys and values of magnitude 1 use the middle of every format's range. Not equal, and not 1.
K_SCALE, V_SCALE = 0.5, 0.25


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One row: a problem and the lengths of its requests.

    Raises:
        InvalidInputError: a request has no query, or fewer keys than queries.
    """

    name: str
    problem: AttentionProblem
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.query_lens) != len(self.seq_lens) or not all(
            1 <= n <= s for n, s in zip(self.query_lens, self.seq_lens, strict=False)
        ):
            raise InvalidInputError(
                describe(
                    f"lengths of {self.name}",
                    value=f"queries {self.query_lens}, keys {self.seq_lens}",
                    limit="each request has a query at least, and a key for each query",
                    remedy="Count a request's new tokens among its keys.",
                )
            )

    @property
    def flops(self) -> float:
        """4 * H * D for each pair of a query and a key that it attends to: masked pairs are not counted."""
        pairs = sum(self._num_pairs(n, s) for n, s in zip(self.query_lens, self.seq_lens, strict=True))
        return 4.0 * self.problem.num_q_heads * self.problem.head_dim * pairs

    def _num_pairs(self, query_len: int, seq_len: int) -> int:
        p = self.problem
        position = torch.arange(seq_len - query_len, seq_len)
        last = position if p.causal else torch.full_like(position, seq_len - 1)
        first = torch.zeros_like(position)
        if p.window is not None:
            last = last.minimum(position + (p.window - 1))
            first = (position - (p.window - 1)).clamp(min=0)
        return int((last - first + 1).sum())

    @property
    def kv_bytes(self) -> int:
        """Keys and values that some query attends to, each read once."""
        p, window = self.problem, self.problem.window
        keys = sum(
            s if window is None else min(s, n + window - 1) for n, s in zip(self.query_lens, self.seq_lens, strict=True)
        )
        return keys * p.num_kv_heads * 2 * p.head_dim * ELEMENT_BYTES.get(p.kv_dtype, 1)

    @property
    def io_bytes(self) -> int:
        """What must move: keys and values once, queries in and the output out."""
        p = self.problem
        rows = 2 * sum(self.query_lens) * p.num_q_heads * p.head_dim * ELEMENT_BYTES[p.dtype]
        return self.kv_bytes + rows


def problem(num_q_heads: int, num_kv_heads: int, head_dim: int, page_size: int | None) -> AttentionProblem:
    """A causal bf16 problem."""
    return AttentionProblem(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        out_dtype="bfloat16",
        page_size=page_size,
    )


class Batch:
    """The tensors of a workload, with random data.

    Paged keys and values lie in pages in random order, and queries are a view of a fused qkv buffer, as in an engine.
    Where they are not paged, q, k and v are dense.

    Args:
        workload: its lengths and problem.
        device: where its tensors are.
        like: a paged batch of the same lengths, whose problem differs in the page size alone: then queries, keys and
            values are its own, in pages anew, and so the answer is the same.

    Attributes:
        q: ``[T, H, D]``.
        kv_cache: ``[num_blocks, HK, page, 2 * D]``, NHD in memory; None where not paged.
        block_table: int32 ``[R, max_blocks]``; None where not paged.
        k, v: ``[S, HK, D]``, the rows of one request after another; None where paged.
        starts, key_starts: int32 ``[R + 1]``, first rows of the requests among queries and keys.
        seq_lens: int32 ``[R]``.
        extras: tensors that the problem has besides: sinks, alibi_slopes, k_scale, v_scale.
    """

    def __init__(self, workload: Workload, device: torch.device, *, like: Batch | None = None) -> None:
        self.workload, self.device, p = workload, device, workload.problem
        self.store: torch.Tensor | None = None
        self.kv_cache: torch.Tensor | None = None
        self.block_table: torch.Tensor | None = None
        self.k: torch.Tensor | None = None
        self.v: torch.Tensor | None = None
        self.q: torch.Tensor
        self.extras: dict[str, torch.Tensor]
        starts, key_starts = (
            torch.tensor([0, *lens]).cumsum(0).int() for lens in (workload.query_lens, workload.seq_lens)
        )
        self.starts_cpu, self.starts, self.key_starts = starts, starts.to(device), key_starts.to(device)
        self.seq_lens = torch.tensor(workload.seq_lens, dtype=torch.int32, device=device)
        self.max_q, self.max_k = max(workload.query_lens), max(workload.seq_lens)
        dtype, rows, width = getattr(torch, p.dtype), sum(workload.query_lens), p.num_q_heads * p.head_dim
        if like is not None:
            self._make_cache()
            self._copy_rows(like)
            self.q, self.extras = like.q, like.extras
            return
        if p.is_paged:
            self._make_cache()
            fused = torch.randn(rows, width + 2 * p.num_kv_heads * p.head_dim, device=device, dtype=dtype)
            self.q = fused[:, :width].view(rows, p.num_q_heads, p.head_dim)
        else:
            shape = (sum(workload.seq_lens), p.num_kv_heads, p.head_dim)
            self.k, self.v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
            self.q = torch.randn(rows, p.num_q_heads, p.head_dim, device=device, dtype=dtype)
        self.extras = _extras(p, device)

    def _make_cache(self) -> None:
        p = self.workload.problem
        assert p.page_size is not None
        pages = [-(-s // p.page_size) for s in self.workload.seq_lens]
        # NHD, seen as the logical [num_blocks, HK, block_size, 2 * D].
        shape = (sum(pages), p.page_size, p.num_kv_heads, 2 * p.head_dim)
        stored = torch.randn(shape, device=self.device, dtype=getattr(torch, p.dtype))
        self.store = (2 * stored).to(getattr(torch, p.kv_dtype)) if p.is_quantized else stored
        self.kv_cache = self.store.permute(0, 2, 1, 3)
        order = torch.randperm(sum(pages), device=self.device).int()
        self.block_table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=self.device)
        for row, ids in enumerate(order.split(pages)):
            self.block_table[row, : len(ids)] = ids

    def _copy_rows(self, other: Batch) -> None:
        """Fill the cache with another's keys and values."""
        page_size = self.workload.problem.page_size
        assert page_size is not None
        assert self.block_table is not None
        store = _indexed(self.store)
        for request, seq_len in enumerate(self.workload.seq_lens):
            rows, (whole, rest) = other._stored_rows(request), divmod(seq_len, page_size)
            pages = self.block_table[request].long()
            store[pages[:whole]] = rows[: seq_len - rest].unflatten(0, (whole, page_size))
            if rest:
                store[pages[whole], :rest] = rows[seq_len - rest :]

    def _stored_rows(self, request: int) -> torch.Tensor:
        """Keys and values ``[s, HK, 2 * D]`` of a request out of its pages, as ``_indexed`` has them."""
        seq_len, page_size = self.workload.seq_lens[request], self.workload.problem.page_size
        assert page_size is not None
        assert self.block_table is not None
        pages = self.block_table[request, : -(-seq_len // page_size)].long()
        return _indexed(self.store)[pages].flatten(0, 1)[:seq_len]

    def new_out(self) -> torch.Tensor:
        """An output ``[T, H, D]`` of NaN: a row that nobody writes shows."""
        return torch.full_like(self.q, torch.nan, memory_format=torch.contiguous_format)

    def keys_and_values(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[s, HK, D]`` of a request, as they are stored, out of its pages."""
        seq_len, head_dim = self.workload.seq_lens[request], self.workload.problem.head_dim
        if self.kv_cache is None or self.block_table is None:
            assert self.k is not None
            assert self.v is not None
            first = int(self.key_starts[request])
            return self.k[first : first + seq_len], self.v[first : first + seq_len]
        rows = self._stored_rows(request).view(self.kv_cache.dtype)
        return rows[..., :head_dim], rows[..., head_dim:]

    def reference(self) -> torch.Tensor:
        """Float64; only for workloads whose dense logits fit into memory."""
        if self.kv_cache is None or self.block_table is None:
            assert self.k is not None
            assert self.v is not None
            return varlen_attention_reference(self.q, self.k, self.v, self.starts, self.key_starts, **self.options())
        return paged_attention_reference(
            self.q, self.kv_cache, self.block_table, self.starts, self.seq_lens, **self.options()
        )

    def options(self) -> dict[str, Any]:
        """What the attention operations and their references take besides lengths, positions and data."""
        p = self.workload.problem
        return {"causal": p.causal, "window": p.window, "soft_cap": p.soft_cap, **self.extras}

    def plan(self, chooser: Chooser | None = None, *, num_splits: int | None = None) -> AttentionPlan:
        """A plan of this batch, in a workspace of its own; arguments as for ``planner``."""
        return self.planner(chooser, num_splits=num_splits)()

    def planner(self, chooser: Chooser | None = None, *, num_splits: int | None = None) -> Callable[[], AttentionPlan]:
        """What makes a plan of this batch, in one workspace: the last one is valid.

        Args:
            chooser: of the configs. Default: this device's tables.
            num_splits: a cap, as for ``plan_attention``.
        """
        p, lens = self.workload.problem, self.workload.seq_lens
        return partial(
            plan_attention,
            p,
            self.starts,
            self.seq_lens if p.is_paged else self.key_starts,
            cu_seqlens_q_cpu=self.starts_cpu,
            max_seqlen_q=self.max_q,
            max_seqlen_k=self.max_k,
            workspace=AttentionWorkspace(
                p, self.device, max_num_reqs=len(lens), max_num_tokens=self.q.shape[0], chooser=chooser
            ),
            seq_lens_cpu_upper_bound=torch.tensor(lens),
            num_splits=num_splits,
        )

    def tilelang(
        self, chooser: Chooser | None = None, *, plan: AttentionPlan | None = None
    ) -> tuple[Launch, torch.Tensor]:
        """This package's kernels with a plan made once, and the output they write.

        Args:
            chooser: as for ``plan``.
            plan: of this batch, instead of one that is made here.
        """
        out, plan = self.new_out(), plan or self.plan(chooser)
        options: dict[str, Any] = self.options() | {
            "max_seqlen_q": self.max_q, "max_seqlen_k": self.max_k, "out": out, "plan": plan,
        }  # fmt: skip
        if self.workload.problem.returns_lse:
            rows, heads = self.q.shape[:2]
            options["lse"] = torch.full((heads, rows), torch.nan, device=self.device)
        if self.kv_cache is not None and self.block_table is not None:
            return partial(
                paged_attention, self.q, self.kv_cache, self.block_table, self.starts, self.seq_lens, **options
            ), out
        assert self.k is not None
        assert self.v is not None
        return partial(varlen_attention, self.q, self.k, self.v, self.starts, self.key_starts, **options), out


def _indexed(store: torch.Tensor | None) -> torch.Tensor:
    """Torch does not index 8-bit floats."""
    assert store is not None
    return store.view(torch.uint8) if store.element_size() == 1 else store


def _extras(p: AttentionProblem, device: torch.device) -> dict[str, torch.Tensor]:
    extras = {}
    if p.sinks_dtype is not None:
        extras["sinks"] = torch.randn(p.num_q_heads, device=device).to(getattr(torch, p.sinks_dtype))
    if p.has_alibi:  # 2^-1, 2^-1.5, ...: any number of heads.
        extras["alibi_slopes"] = 2.0 ** -(1 + torch.arange(p.num_q_heads, device=device) % 16 / 2)
    if p.is_quantized:
        extras |= {
            name: torch.full((1,), scale, device=device) for name, scale in (("k_scale", K_SCALE), ("v_scale", V_SCALE))
        }
    return extras
