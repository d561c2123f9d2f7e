"""Launch of the split-KV decode and its combine."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


def launch_decode(
    plan: DecodePlan,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    strides: Strides,
    extras: tuple[int, ...],
) -> None:
    """One launch, or two with a combine."""
    launches.record("decode", plan.source)
    plan.kernel(
        q.data_ptr(),
        kv_cache.data_ptr(),
        out.data_ptr(),
        *extras,
        block_table.data_ptr(),
        cu_seqlens_q.data_ptr(),
        seq_lens.data_ptr(),
        plan.partial_o.data_ptr(),
        plan.partial_lse.data_ptr(),
        plan.num_requests,
        plan.num_splits,
        q.shape[0],
        block_table.shape[1],
        softmax_scale,
        *strides.q,
        *strides.k,
        *strides.out,
        strides.block_table,
        strides.lse,
    )
    if plan.combine is not None:
        launches.record("decode_combine")
        plan.combine(
            out.data_ptr(),
            *extras[:2],
            cu_seqlens_q.data_ptr(),
            plan.partial_o.data_ptr(),
            plan.partial_lse.data_ptr(),
            plan.num_requests,
            plan.num_splits,
            *strides.out,
            strides.lse,
        )
