"""Launch of the varlen prefill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tl_backend.configs.tile import TileConfig
from tl_backend.device import DeviceSpec
from tl_backend.ops.checks import Strides
from tl_backend.ops.compiled import Kernel, KernelKey
from tl_backend.problem import AttentionProblem
from tl_backend.telemetry import launches


@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """The prefill part of a step.

    Attributes:
        kernel: compiled.
        work: int32 ``[capacity, 2]`` on the device, (request, first token); its first ``num_work`` rows count.
        num_work: tiles of query tokens.
        source: where the kernel's config comes from, for people.
    """

    kernel: Kernel
    work: torch.Tensor
    num_work: int
    source: str


def prefill_key(problem: AttentionProblem, config: TileConfig, device: DeviceSpec) -> KernelKey:
    """Of the prefill kernel."""
    return KernelKey("prefill", problem, config, device)


def work_list(
    query_lens: np.ndarray, first_request: int, tokens_per_tile: int, contexts: np.ndarray | None = None
) -> np.ndarray:
    """Tiles of the requests from ``first_request`` on, those with most keys first.

    Starting with the longest keeps the last wave of blocks short.

    Args:
        query_lens: new tokens of each request, ``[R]``.
        contexts: tokens of each request that are cached already, or an upper bound. Orders the list, and no more.

    Returns:
        int32 ``[W, 2]`` of (request, first token).
    """
    tiles = -(-query_lens[first_request:] // tokens_per_tile)
    requests = np.repeat(np.arange(first_request, len(query_lens)), tiles)
    starts = np.cumsum(tiles) - tiles
    tokens = (np.arange(len(requests)) - np.repeat(starts, tiles)) * tokens_per_tile
    keys = tokens if contexts is None else tokens + contexts[requests]
    order = np.argsort(-keys, kind="stable")
    return np.stack([requests, tokens], axis=1)[order].astype(np.int32)


def launch_prefill(
    plan: PrefillPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    strides: Strides,
    extras: tuple[int, ...],
) -> None:
    """One launch. ``k`` and ``v`` are both the cache; or contiguous, with cu_seqlens_k for ``block_table``."""
    launches.record("prefill", plan.source)
    plan.kernel(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        *extras,
        block_table.data_ptr(),
        cu_seqlens_q.data_ptr(),
        seq_lens.data_ptr(),
        plan.work.data_ptr(),
        plan.num_work,
        q.shape[0],
        block_table.shape[-1],
        softmax_scale,
        *strides.q,
        *strides.k,
        *strides.v,
        *strides.out,
        strides.block_table,
        strides.lse,
    )
