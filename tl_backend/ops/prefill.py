"""Launch of the varlen prefill, of whichever family serves."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tl_backend.configs.choice import PrefillConfig
from tl_backend.configs.decode import combine_threads
from tl_backend.configs.prefill_hopper import HopperPrefillConfig
from tl_backend.device import DeviceSpec
from tl_backend.ops.checks import Strides
from tl_backend.ops.compiled import Kernel, KernelKey
from tl_backend.ops.decode import Tails, merged_problem
from tl_backend.problem import AttentionProblem
from tl_backend.telemetry import launches

PORTABLE, HOPPER, COMBINE = "prefill", "prefill_hopper", "prefill_combine"


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What Hopper's prefill has beside the portable one: blocks that take work by a counter, and tiles in pieces.

    Attributes:
        counter: int32 ``[1]``, zero; every launch leaves it so.
        partial_o: float32 ``[>= pieces * tokens_per_tile of all split tiles, H, D]``.
        partial_lse: float32, the same rows, ``[..., H]``, base 2.
        split: int32 ``[C, 4]`` on the device: the split list of ``work_list``.
        tokens_per_tile: of the config.
        combine: merges the pieces; None where nothing is split.
    """

    counter: torch.Tensor
    partial_o: torch.Tensor
    partial_lse: torch.Tensor
    split: torch.Tensor
    tokens_per_tile: int
    combine: Kernel | None


@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """The prefill part of a step.

    Attributes:
        kind: of the kernel: "prefill" or "prefill_hopper".
        kernel: compiled.
        work: int32 ``[capacity, 4]`` on the device, as ``work_list`` makes it; its first ``num_work`` rows count.
        num_work: pieces of tiles of query tokens.
        pieces: of Hopper's; None for the portable kernel.
        source: where the kernel's config comes from, for people.
    """

    kind: str
    kernel: Kernel
    work: torch.Tensor
    num_work: int
    pieces: Pieces | None
    source: str


def prefill_key(problem: AttentionProblem, config: PrefillConfig, device: DeviceSpec) -> KernelKey:
    """Of the prefill kernel of the config's family."""
    return KernelKey(HOPPER if isinstance(config, HopperPrefillConfig) else PORTABLE, problem, config, device)


def combine_key(problem: AttentionProblem, device: DeviceSpec) -> KernelKey:
    """Of the kernel that merges the pieces of Hopper's prefill."""
    return KernelKey(COMBINE, merged_problem(problem), combine_threads(problem), device)


def prefill_keys(
    problem: AttentionProblem, config: PrefillConfig, device: DeviceSpec, *, splits: bool
) -> list[KernelKey]:
    """All that launches of a config can ask for.

    Args:
        splits: whether tiles may be cut into pieces. Those of the portable family never are.
    """
    keys = [prefill_key(problem, config, device)]
    if splits and isinstance(config, HopperPrefillConfig):
        keys.append(combine_key(problem, device))
    return keys


def prefill_tails(
    plan: PrefillPlan,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    num_rows: int,
    num_blocks: int,
    softmax_scale: float,
    strides: Strides,
) -> Tails:
    """Of ``launch_prefill``, for layers with queries of ``num_rows`` rows, padding included.

    Args:
        block_table: without pages cu_seqlens_k; so, too, ``seq_lens``.
        num_blocks: of the cache.
    """
    starts, pieces = cu_seqlens_q.data_ptr(), plan.pieces
    scratch: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    combine: tuple[float, ...] = ()
    v_strides = strides.v
    if pieces is not None:  # The family has no use for V apart from the cache.
        partials = (pieces.partial_o.data_ptr(), pieces.partial_lse.data_ptr())
        scratch, blocks, v_strides = (pieces.counter.data_ptr(), *partials), (num_blocks,), ()
        merged = (pieces.split.data_ptr(), *partials, pieces.split.shape[0], pieces.tokens_per_tile)
        combine = (starts, *merged, *strides.out, strides.lse)
    attention = (
        block_table.data_ptr(),
        starts,
        seq_lens.data_ptr(),
        plan.work.data_ptr(),
        *scratch,
        plan.num_work,
        num_rows,
        *blocks,
        block_table.shape[-1],
        softmax_scale,
        *strides.q,
        *strides.k,
        *v_strides,
        *strides.out,
        strides.block_table,
        strides.lse,
    )
    return Tails(attention=attention, combine=combine)


def launch_prefill(plan: PrefillPlan, tails: Tails, q: int, k: int, v: int, out: int, extras: tuple[int, ...]) -> None:
    """One launch, or two with a combine.

    Args:
        q, k, v, out: addresses; of a cache both k and v.
        extras: those of lse, sinks, slopes, k_scale and v_scale, 0 for what there is not.
    """
    launches.record(plan.kind, plan.source)
    if plan.pieces is None:
        plan.kernel(q, k, v, out, *extras, *tails.attention)
        return
    lse, sinks, _, k_scale, v_scale = extras  # Hopper's has no use for V apart from the cache, nor for slopes.
    plan.kernel(q, k, out, lse, sinks, k_scale, v_scale, *tails.attention)
    if plan.pieces.combine is not None:
        launches.record(COMBINE)
        plan.pieces.combine(out, lse, sinks, *tails.combine)
