"""The plan of a step: what all layers of one problem share, made once, into persistent buffers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from tl_backend.configs import decode as decode_config
from tl_backend.configs.choice import PrefillConfig
from tl_backend.configs.decode import DecodeChoice
from tl_backend.configs.prefill_hopper import HopperPrefillConfig
from tl_backend.configs.regime import Regime
from tl_backend.errors import InvalidInputError, describe
from tl_backend.ops.decode import DecodePlan
from tl_backend.ops.families import PORTABLE_PREFILLS
from tl_backend.ops.layer import MAX_LAYERS, Layer
from tl_backend.ops.prefill import Pieces, PrefillPlan
from tl_backend.ops.work_list import work_list
from tl_backend.ops.workspace import AttentionWorkspace, lanes
from tl_backend.problem import AttentionProblem
from tl_backend.telemetry import launches


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """What one step needs. Valid until the next plan that is made in the same workspace.

    Attributes:
        problem: what it was made for.
        num_rows: query rows of the step, ``cu_seqlens_q[-1]``; output rows from here on are zero.
        decode: the leading requests with at most one query token, or None if there are none with a token.
        prefill: all other requests, or None.
        layers: what it has served, by what their tensors look like.
    """

    problem: AttentionProblem
    num_rows: int
    decode: DecodePlan | None
    prefill: PrefillPlan | None
    layers: dict[tuple[object, ...], Layer] = field(default_factory=dict, repr=False, compare=False)

    def keep(self, looks: tuple[object, ...], layer: Layer) -> None:
        """Keep a layer that was checked for all that look like it."""
        if len(self.layers) >= MAX_LAYERS:
            self.layers.clear()
        self.layers[looks] = layer


def plan_attention(
    problem: AttentionProblem,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q_cpu: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    workspace: AttentionWorkspace,
    seq_lens_cpu_upper_bound: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> AttentionPlan:
    """Plan one step for all layers of a problem. Neither syncs with the device nor allocates on it.

    The leading requests with at most one query token go to the split-KV decode, all others to the prefill. Where keys
    and values are contiguous, and in a batch-invariant workspace, the prefill takes them all.

    Args:
        problem: of the layers.
        cu_seqlens_q: int32 ``[R + 1]`` on the device: where each request's query rows start.
        seq_lens: int32 ``[R]`` on the device: keys of each request, the new ones included; for contiguous keys
            ``cu_seqlens_k``, int32 ``[R + 1]``.
        cu_seqlens_q_cpu: int32 ``[R + 1]``, the same values on the host.
        max_seqlen_q: longest query; 1 or less says that every request is a decode.
        max_seqlen_k: longest sequence, or an upper bound.
        workspace: whose buffers the plan uses; they belong to the plan until the next one is made there.
        seq_lens_cpu_upper_bound: ``[R]`` on the host: orders the prefill's work, longest first; and where there is too
            little of it for the device, Hopper's prefill cuts keys into pieces by it. Optional.
        num_splits: a cap on the pieces that a decode request's keys are cut into; 1 for none. Optional.

    Raises:
        InvalidInputError: the step is larger than the workspace, or the workspace belongs to another problem.
    """
    del cu_seqlens_q, seq_lens  # Kernels read them at launch; later families plan on the device from them.
    if workspace.problem is not problem and workspace.problem != problem:
        raise InvalidInputError(
            describe(
                "workspace",
                value=f"made for {workspace.problem}",
                limit=f"the plan is for {problem}",
                remedy="Make one AttentionWorkspace for each problem.",
            )
        )
    if num_splits is not None and num_splits < 1:
        raise InvalidInputError(
            describe("num_splits", value=num_splits, limit="at least 1", remedy="Pass None to let the plan choose.")
        )
    starts = cu_seqlens_q_cpu.numpy()
    query_lens = starts[1:] - starts[:-1]
    num_rows, num_reqs = int(starts[-1]), len(query_lens)
    if num_reqs > workspace.max_num_reqs or num_rows > workspace.max_num_tokens:
        raise InvalidInputError(
            describe(
                "step",
                value=f"{num_reqs} requests, {num_rows} tokens",
                limit=f"the workspace holds {workspace.max_num_reqs} and {workspace.max_num_tokens}",
                remedy="Make the AttentionWorkspace for the scheduler's limits.",
            )
        )
    num_decodes = 0
    if workspace.decodes:
        num_decodes = num_reqs if max_seqlen_q <= 1 else _first_true(query_lens > 1)
    decode = prefill = None
    if num_decodes and starts[num_decodes] > 0:
        decode = _plan_decode(workspace, num_decodes, max_seqlen_k, num_splits)
    if num_rows > starts[num_decodes]:
        bound = None if seq_lens_cpu_upper_bound is None else seq_lens_cpu_upper_bound.numpy()[:num_reqs]
        prefill = _plan_prefill(workspace, query_lens, num_decodes, max_seqlen_k, bound)
    return AttentionPlan(problem=problem, num_rows=num_rows, decode=decode, prefill=prefill)


def _first_true(flags: np.ndarray) -> int:
    """The index of the first, or the number of flags if there is none."""
    first = int(flags.argmax()) if len(flags) else 0
    return first if flags[first:].any() else len(flags)


def _plan_prefill(
    workspace: AttentionWorkspace,
    query_lens: np.ndarray,
    first_request: int,
    max_seqlen_k: int,
    seq_lens: np.ndarray | None,
) -> PrefillPlan:
    num_tokens, num_requests = int(query_lens[first_request:].sum()), len(query_lens) - first_request
    longest = max_seqlen_k if seq_lens is None else int(seq_lens[first_request:].max())
    is_first = seq_lens is not None and not (seq_lens - query_lens)[first_request:].any()
    regime = Regime.of(
        phase="prefill" if is_first else "extend",
        query_len=-(-num_tokens // num_requests),
        context_len=longest,
        num_requests=num_requests,
    )
    choice = workspace.chooser.choose(regime)
    config = cast("PrefillConfig", choice.config)
    tiles = workspace.tilings[config]
    work = work_list(workspace.problem, tiles, query_lens, first_request, seq_lens)
    split = workspace.upload(work)
    kernels = workspace.kernels(config, split=len(work.split) > 0)
    pieces = None
    if isinstance(config, HopperPrefillConfig):
        pieces = Pieces(
            counter=workspace.counter,
            partial_o=workspace.partial_o,
            partial_lse=workspace.partial_lse,
            split=split,
            tokens_per_tile=tiles.tokens,
            combine=kernels.combine,
        )
    elif workspace.portable_reason is not None:
        launches.record_event(PORTABLE_PREFILLS, workspace.portable_reason)
    return PrefillPlan(
        kind=kernels.kind,
        kernel=kernels.kernel,
        work=workspace.work,
        num_work=len(work.items),
        pieces=pieces,
        source=choice.source,
    )


def _plan_decode(workspace: AttentionWorkspace, num_decodes: int, max_seqlen_k: int, cap: int | None) -> DecodePlan:
    problem, spec = workspace.problem, workspace.spec
    max_keys = max_seqlen_k if problem.window is None else min(max_seqlen_k, problem.window)
    regime = Regime.of(phase="decode", query_len=1, context_len=max_keys, num_requests=num_decodes)
    choice = workspace.chooser.choose(regime)
    config = cast("DecodeChoice", choice.config)
    splits = decode_config.num_splits(
        num_decodes, lanes(problem, config.tile), max_keys, spec, config.blocks_per_multiprocessor
    )
    splits = splits if cap is None else min(splits, cap)
    kernels = workspace.kernels(config, split=splits > 1)
    return DecodePlan(
        kernel=kernels.kernel,
        combine=kernels.combine,
        num_requests=num_decodes,
        num_splits=splits,
        partial_o=workspace.partial_o,
        partial_lse=workspace.partial_lse,
        source=choice.source,
    )
