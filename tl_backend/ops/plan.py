"""The plan of a step: what all layers of one problem share, made once, into persistent buffers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from tl_backend.configs import decode as decode_config
from tl_backend.configs.choice import Chooser, PrefillConfig
from tl_backend.configs.decode import DecodeChoice
from tl_backend.configs.prefill_hopper import HopperPrefillConfig
from tl_backend.configs.regime import Regime
from tl_backend.configs.tile import TileConfig
from tl_backend.device import DeviceSpec
from tl_backend.errors import InvalidInputError, describe
from tl_backend.ops.checks import check_supported
from tl_backend.ops.choices import chooser_for
from tl_backend.ops.compiled import KERNELS
from tl_backend.ops.decode import DecodePlan, decode_keys
from tl_backend.ops.families import PORTABLE_PREFILLS, portable_reason
from tl_backend.ops.layer import MAX_LAYERS, Layer
from tl_backend.ops.prefill import Pieces, PrefillPlan, combine_key, prefill_key
from tl_backend.ops.work_list import COLUMNS, Work, tiling, work_list
from tl_backend.problem import AttentionProblem
from tl_backend.telemetry import launches

# Host buffers of the work list that take turns. Each is guarded by an event, so that more steps in flight than this
# would wait for the oldest copy and never overwrite it; asynchronous scheduling has two.
NUM_HOST_BUFFERS = 4


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


class AttentionWorkspace:
    """Persistent buffers for the plans of one problem on one device.

    Args:
        problem: whose plans are made here.
        device: where its tensors are.
        max_num_reqs: most requests of a step.
        max_num_tokens: most query tokens of a step.
        batch_invariant: the bits of a token's output depend on its own request alone: neither on the others of the step
            nor on how its prompt is cut into chunks. Everything goes through the prefill, which adds the keys of every
            query row in the same order and the same tiles; decodes are slower.
        chooser: of the configs. Default: this device's tables.

    Raises:
        UnsupportedError: the device does not serve the problem.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        device: torch.device,
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        batch_invariant: bool = False,
        chooser: Chooser | None = None,
    ) -> None:
        self.spec = DeviceSpec.of(device)
        check_supported(problem, self.spec)
        self.problem = problem
        self.chooser = chooser or chooser_for(problem, self.spec, batch_invariant=batch_invariant)
        # The decode reads pages, and adds in another order than the prefill.
        self.decodes = problem.is_paged and not batch_invariant
        # How many pieces a tile of queries has depends on the batch, and pieces add in another order than a whole.
        self.splits = not batch_invariant
        self.portable_reason = portable_reason(problem, self.spec)
        self.max_num_reqs, self.max_num_tokens = max_num_reqs, max_num_tokens
        prefills = cast("tuple[PrefillConfig, ...]", self.chooser.configs("prefill"))
        decodes = cast("tuple[DecodeChoice, ...]", self.chooser.configs("decode")) if self.decodes else ()
        tilings = [tiling(problem, config, self.spec, splits=self.splits) for config in prefills]
        capacity = max(tiles.capacity(max_num_reqs, max_num_tokens) for tiles in tilings)
        self.work = torch.empty(capacity, COLUMNS, dtype=torch.int32, device=device)
        # Blocks of Hopper's prefill take their work by it. Of this workspace alone: launches side by side would mix.
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        self._hosts = [_HostBuffer(capacity, pinned=device.type == "cuda") for _ in range(NUM_HOST_BUFFERS)]
        self._turn = 0
        # One scratch: a step's decode has merged its pieces before its prefill writes some.
        partials = max(
            *(tiles.max_partials for tiles in tilings),
            *(
                decode_config.max_partials(
                    max_num_reqs, lanes(problem, choice.tile), self.spec, choice.blocks_per_multiprocessor
                )
                for choice in decodes
            ),
            0,
        )
        heads, head_dim = problem.num_q_heads, problem.head_dim
        self.partial_o = torch.empty(partials, heads, head_dim, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(partials, heads, dtype=torch.float32, device=device)

    def upload(self, work: Work) -> torch.Tensor:
        """Copy work to the device without waiting for it: into ``work``; the split list behind it is returned."""
        host = self._hosts[self._turn]
        self._turn = (self._turn + 1) % NUM_HOST_BUFFERS
        return host.copy_to(self.work, work)


def lanes(problem: AttentionProblem, tile: TileConfig) -> int:
    """Blocks of one decode request and piece."""
    return problem.num_kv_heads * tile.head_tiles(problem)


class _HostBuffer:
    """A host buffer and the event after its last copy to the device."""

    def __init__(self, capacity: int, *, pinned: bool) -> None:
        self._buffer = torch.empty(capacity, COLUMNS, dtype=torch.int32, pin_memory=pinned)
        self._rows = self._buffer.numpy()
        self._copied = torch.cuda.Event() if pinned else None

    def copy_to(self, device_buffer: torch.Tensor, work: Work) -> torch.Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        num_items = len(work.items)
        num_rows = num_items + len(work.split)
        self._rows[:num_items] = work.items
        self._rows[num_items:num_rows] = work.split
        device_buffer[:num_rows].copy_(self._buffer[:num_rows], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return device_buffer[num_items:num_rows]


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
    if workspace.problem != problem:
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
    query_lens = np.diff(starts)
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
        num_decodes = num_reqs if max_seqlen_q <= 1 else int(np.argmax(np.append(query_lens > 1, True)))
    decode = prefill = None
    if num_decodes and starts[num_decodes] > 0:
        decode = _plan_decode(workspace, num_decodes, max_seqlen_k, num_splits)
    if num_rows > starts[num_decodes]:
        bound = None if seq_lens_cpu_upper_bound is None else seq_lens_cpu_upper_bound.numpy()[:num_reqs]
        prefill = _plan_prefill(workspace, query_lens, num_decodes, max_seqlen_k, bound)
    return AttentionPlan(problem=problem, num_rows=num_rows, decode=decode, prefill=prefill)


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
    problem, spec = workspace.problem, workspace.spec
    choice = workspace.chooser.choose(regime)
    config = cast("PrefillConfig", choice.config)
    key = prefill_key(problem, config, spec)
    tiles = tiling(problem, config, spec, splits=workspace.splits)
    work = work_list(problem, tiles, query_lens, first_request, seq_lens)
    split = workspace.upload(work)
    pieces = None
    if isinstance(config, HopperPrefillConfig):
        pieces = Pieces(
            counter=workspace.counter,
            partial_o=workspace.partial_o,
            partial_lse=workspace.partial_lse,
            split=split,
            tokens_per_tile=tiles.tokens,
            combine=KERNELS.get(combine_key(problem, spec)) if len(work.split) else None,
        )
    elif workspace.portable_reason is not None:
        launches.record_event(PORTABLE_PREFILLS, workspace.portable_reason)
    return PrefillPlan(
        kind=key.kind,
        kernel=KERNELS.get(key),
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
    kernel, *combine = map(KERNELS.get, decode_keys(problem, config.tile, spec, split=splits > 1))
    return DecodePlan(
        kernel=kernel,
        combine=combine[0] if combine else None,
        num_requests=num_decodes,
        num_splits=splits,
        partial_o=workspace.partial_o,
        partial_lse=workspace.partial_lse,
        source=choice.source,
    )
