"""Batches of paged attention in which everything that a kernel must not touch is poison.

Legend: T query rows, H query heads, HK kv heads, D head size, R requests, N blocks of the KV pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from tl_backend.problem import AttentionProblem
from tl_backend.testing.views import KVLayout, View, kv_pool, odd_strides, out_store, out_view, page_size_of, q_view

Tail = int | Literal["stale"]

SPARE_BLOCKS = 2  # Blocks of the pool that no request owns.
TABLE_TAIL = 3  # Block-table entries past the longest request's last block.
GARBAGE = 2**31 - 1
# What stands for NaN and for infinity in an 8-bit cache: e4m3fn has no infinity, and takes its other NaN; e4m3fnuz has
# neither infinity nor a second NaN, and takes its least number.
POISON_BITS = {"float8_e4m3fn": (0x7F, 0xFF), "float8_e4m3fnuz": (0x80, 0xFF), "float8_e5m2": (0x7F, 0x7C)}


def make_problem(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int | None,
    *,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    **features: Any,
) -> AttentionProblem:
    """An AttentionProblem with one head size, and but for ``kv_dtype`` one dtype, throughout.

    Args:
        features: further fields: causal, window, soft_cap, sinks_dtype, has_alibi, returns_lse.
    """
    return AttentionProblem(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        out_dtype=dtype,
        page_size=page_size,
        **features,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """The dynamic side of one test.

    Attributes:
        query_lens: query tokens of each request; 0 is legal.
        seq_lens: keys of each request, its query tokens included; 0 is legal.
        kv_layout: "HND" or "NHD"; "layers": HND blocks of a tensor that holds three layers a block, so that a block's
            stride is three times its size; "padded": NHD with gaps between heads and between slots.
        q_view: "dense"; "fused": the q part of a qkv buffer, the rest of which is NaN; "padded": gaps between heads;
            "heads_first": a transposed view.
        out_view: as q_view, without "fused".
        padding_rows: query rows past the last request's; they hold NaN.
        num_splits: pieces that every decode request is cut into, whatever the heuristic says; None leaves it to that.
        softmax_scale: None for the default.
        sinks: values that the heads take in turn, for a problem with sinks; empty for random ones near the logits.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    kv_layout: KVLayout = "HND"
    q_view: View = "fused"
    out_view: View = "dense"
    padding_rows: int = 3
    num_splits: int | None = None
    softmax_scale: float | None = None
    sinks: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.query_lens) == len(self.seq_lens), "one query length and one sequence length a request"

    @property
    def num_decodes(self) -> int:
        """Leading requests with at most one query token, which go to the decode."""
        return next((i for i, length in enumerate(self.query_lens) if length > 1), len(self.query_lens))

    @property
    def has_decode(self) -> bool:
        return any(self.query_lens[: self.num_decodes])

    @property
    def has_prefill(self) -> bool:
        return self.num_decodes < len(self.query_lens)

    def __str__(self) -> str:
        splits = "" if self.num_splits is None else f", {self.num_splits} splits"
        sinks = f", sinks {list(self.sinks)}" if self.sinks else ""
        return (
            f"q {list(self.query_lens)}, keys {list(self.seq_lens)}, kv {self.kv_layout}, q {self.q_view}, "
            f"out {self.out_view}{splits}{sinks}"
        )


@dataclass(kw_only=True)
class Batch:
    """The tensors of a case.

    Attributes:
        kv_store, out_store: whole allocations, of which ``kv_cache`` and ``out`` are views: a block before and after
            the pool and rows around the output are canaries.
        kv_SHD: keys and values of all requests' tokens as they are stored, ``[sum(seq_lens), HK, 2 * D]``; 8-bit floats
            as their bits.
        extras: what else the problem has: sinks, alibi_slopes, k_scale, v_scale.
        lse: float32 ``[H, T]`` if the problem returns it.
        page_S, offset_S, request_S: where each of those tokens lies, and whose it is.
        visible_S: whether some query of its request attends to it, by the window.
    """

    problem: AttentionProblem
    case: Case
    q: torch.Tensor
    kv_store: torch.Tensor
    kv_cache: torch.Tensor
    out_store: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    kv_SHD: torch.Tensor
    page_S: torch.Tensor
    offset_S: torch.Tensor
    request_S: torch.Tensor
    visible_S: torch.Tensor
    num_pages: list[int] = field(default_factory=list)
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    lse: torch.Tensor | None = None

    @property
    def out(self) -> torch.Tensor:
        return out_view(self.out_store, self.problem, self.case.out_view)

    def poison(self, value: float, tail: Tail, *, dead: Iterable[int] = ()) -> None:
        """Fill all that no request owns.

        Args:
            value: of unwritten slots, unowned blocks and canaries; in an 8-bit cache, cut to the range of its dtype.
            tail: of block-table entries past a request's last block; "stale" is the first block of the next request.
            dead: requests whose keys and values become ``value`` as well.
        """
        store, cache = self.kv_store, self.kv_cache
        if self.problem.is_quantized:
            store, cache = store.view(torch.uint8), cache.view(torch.uint8)
            store.fill_(_poison_bits(value, self.problem.kv_dtype))
        else:
            store.fill_(value)
        # What all windows have left behind is freed, and another's.
        alive_S = self.visible_S.clone()
        for request in dead:
            alive_S &= self.request_S != request
        cache[self.page_S[alive_S], :, self.offset_S[alive_S]] = self.kv_SHD[alive_S]
        for request, pages in enumerate(self.num_pages):
            neighbour = (request + 1) % len(self.num_pages)
            stale = int(self.block_table[neighbour, 0]) if self.num_pages[neighbour] else 0
            self.block_table[request, pages:] = stale if tail == "stale" else tail


def make_batch(problem: AttentionProblem, case: Case, device: torch.device, *, seed: int = 0) -> Batch:
    """The tensors of ``case``, with random values and scattered blocks; call ``poison`` before the first use.

    Logits have a standard deviation of about 2, so that a wrong mask or scale shows.
    """
    cpu = torch.Generator().manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, problem.dtype)
    heads, kv_heads, head_dim = problem.num_q_heads, problem.num_kv_heads, problem.head_dim
    num_tokens = sum(case.query_lens)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    q = q_view(num_tokens + case.padding_rows, problem, case.q_view, dtype, device)
    q.fill_(math.nan)
    q[:num_tokens] = 2 * randn(num_tokens, heads, head_dim)

    page_size = page_size_of(problem)
    num_pages = [-(-length // page_size) for length in case.seq_lens]
    num_blocks = sum(num_pages) + SPARE_BLOCKS
    blocks = torch.randperm(num_blocks, generator=cpu, dtype=torch.int32)
    num_columns = max(num_pages, default=0) + TABLE_TAIL
    # Rows of a wider table, as vLLM keeps one for its longest sequence.
    wide_table = torch.full((len(num_pages), num_columns + 5), GARBAGE, dtype=torch.int32)
    table = wide_table[:, :num_columns]
    pages, offsets, requests, visible = [], [], [], []
    for request, (length, count) in enumerate(zip(case.seq_lens, num_pages, strict=True)):
        first = sum(num_pages[:request])
        table[request, :count] = blocks[first : first + count]
        position = torch.arange(length)
        pages.append(table[request][position // page_size].long())
        offsets.append(position % page_size)
        requests.append(torch.full((length,), request))
        oldest = 0 if problem.window is None else length - case.query_lens[request] - problem.window + 1
        visible.append(position >= oldest)
    kv_store, kv_cache = kv_pool(problem, num_blocks, case.kv_layout, getattr(torch, problem.kv_dtype), device)
    out_whole = out_store(num_tokens + case.padding_rows, problem, case.out_view, dtype, device)
    starts = torch.tensor([0, *case.query_lens]).cumsum(0)
    extras = _extras(problem, case, device, randn)
    kv_SHD = randn(sum(case.seq_lens), kv_heads, 2 * head_dim)
    if problem.is_quantized:
        kv_SHD = quantized(kv_SHD, extras, problem)
    num_rows = num_tokens + case.padding_rows
    return Batch(
        problem=problem,
        case=case,
        q=odd_strides(q),
        kv_store=kv_store,
        kv_cache=kv_cache,
        out_store=out_whole,
        block_table=odd_strides(wide_table.to(device)[:, :num_columns]),
        cu_seqlens_q=_with_garbage_after(starts, device),
        seq_lens=_with_garbage_after(torch.tensor(case.seq_lens, dtype=torch.int64), device),
        kv_SHD=kv_SHD,
        page_S=torch.cat(pages).to(device),
        offset_S=torch.cat(offsets).to(device),
        request_S=torch.cat(requests).to(device),
        visible_S=torch.cat(visible).to(device),
        num_pages=num_pages,
        extras=extras,
        lse=torch.empty(heads, num_rows, device=device) if problem.returns_lse else None,
    )


def _poison_bits(value: float, kv_dtype: str) -> int:
    nan, infinite = POISON_BITS[kv_dtype]
    if not math.isfinite(value):
        return nan if math.isnan(value) else infinite
    dtype = getattr(torch, kv_dtype)
    largest = torch.finfo(dtype).max
    return int(torch.tensor(value).clamp(-largest, largest).to(dtype).view(torch.uint8))


def _extras(
    problem: AttentionProblem, case: Case, device: torch.device, randn: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    heads, extras = problem.num_q_heads, {}
    if problem.sinks_dtype is not None:  # As large as logits: neither nothing nor all of the denominator.
        sinks = 2 * randn(heads)
        if case.sinks:
            sinks = torch.tensor(case.sinks, device=device).repeat(-(-heads // len(case.sinks)))[:heads]
        extras["sinks"] = sinks.to(getattr(torch, problem.sinks_dtype))
    if problem.has_alibi:  # 2^-1, 2^-1.5, ...: any number of heads.
        extras["alibi_slopes"] = 2.0 ** -(1 + torch.arange(heads, device=device) % 16 / 2)
    if problem.is_quantized:  # Neither 1 nor equal.
        extras |= {"k_scale": torch.full((1,), 0.04, device=device), "v_scale": torch.full((1,), 3.0, device=device)}
    return extras


def quantized(kv_SHD: torch.Tensor, scales: dict[str, torch.Tensor], problem: AttentionProblem) -> torch.Tensor:
    """The bits that hold keys and values divided by their scales."""
    dtype = getattr(torch, problem.kv_dtype)
    largest = torch.finfo(dtype).max
    halves = [
        half.float() / scales[name] for half, name in zip(kv_SHD.chunk(2, -1), ("k_scale", "v_scale"), strict=True)
    ]
    return torch.cat(halves, -1).clamp(-largest, largest).to(dtype).view(torch.uint8)


def _with_garbage_after(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Int32 values at the start of a longer buffer, as vLLM's persistent buffers are; what follows must not be read."""
    return torch.cat([values, torch.full((4,), GARBAGE)]).int().to(device)[: len(values)]
