"""Launch of the split-KV decode and its combine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tl_backend.configs.decode import DecodeConfig, combine_threads
from tl_backend.configs.tile import TileConfig
from tl_backend.device import DeviceSpec
from tl_backend.ops.checks import Strides
from tl_backend.ops.compiled import Kernel, KernelKey
from tl_backend.problem import PAGE_SIZE_STEP, AttentionProblem
from tl_backend.telemetry import launches


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """The decode part of a step: its leading requests, of at most one query token each.

    Attributes:
        kernel: compiled; writes the output where ``combine`` is None, else partial results.
        combine: merges the pieces.
        num_requests: requests of the part.
        num_splits: pieces a request.
        partial_o: float32 ``[>= num_requests * num_splits, H, D]``.
        partial_lse: float32 ``[>= num_requests * num_splits, H]``, base 2.
        source: where the kernel's config comes from, for people.
    """

    kernel: Kernel
    combine: Kernel | None
    num_requests: int
    num_splits: int
    partial_o: torch.Tensor
    partial_lse: torch.Tensor
    source: str


def decode_keys(problem: AttentionProblem, tile: TileConfig, device: DeviceSpec, *, split: bool) -> list[KernelKey]:
    """Of the decode kernel and, with ``split``, of the combine."""
    keys = [KernelKey("decode", problem, DecodeConfig(tile=tile, split=split), device)]
    if split:
        keys.append(KernelKey("decode_combine", merged_problem(problem), combine_threads(problem), device))
    return keys


def merged_problem(problem: AttentionProblem) -> AttentionProblem:
    """What a combine is compiled for: problems that differ in pages, kv heads or the mask alone share one."""
    return replace(
        problem,
        page_size=PAGE_SIZE_STEP,
        num_kv_heads=problem.num_q_heads,
        causal=True,
        window=None,
        soft_cap=None,
        has_alibi=False,
    )


class Tails(NamedTuple):
    """What the launches of a plan pass after the addresses of a layer's own tensors.

    Attributes:
        attention: the last arguments of the attention kernel.
        combine: of its combine.
    """

    attention: tuple[float, ...]
    combine: tuple[float, ...]


def decode_tails(
    plan: DecodePlan,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    num_rows: int,
    softmax_scale: float,
    strides: Strides,
) -> Tails:
    """Of ``launch_decode``, for layers with queries of ``num_rows`` rows, padding included."""
    starts = cu_seqlens_q.data_ptr()
    partials = (plan.partial_o.data_ptr(), plan.partial_lse.data_ptr(), plan.num_requests, plan.num_splits)
    return Tails(
        attention=(
            block_table.data_ptr(),
            starts,
            seq_lens.data_ptr(),
            *partials,
            num_rows,
            block_table.shape[1],
            softmax_scale,
            *strides.q,
            *strides.k,
            *strides.out,
            strides.block_table,
            strides.lse,
        ),
        combine=(starts, *partials, *strides.out, strides.lse),
    )


def launch_decode(plan: DecodePlan, tails: Tails, q: int, kv_cache: int, out: int, extras: tuple[int, ...]) -> None:
    """One launch, or two with a combine.

    Args:
        q, kv_cache, out: addresses.
        extras: those of lse, sinks, slopes, k_scale and v_scale, 0 for what there is not.
    """
    launches.record("decode", plan.source)
    plan.kernel(q, kv_cache, out, *extras, *tails.attention)
    if plan.combine is not None:
        launches.record("decode_combine")
        plan.combine(out, extras[0], extras[1], *tails.combine)
