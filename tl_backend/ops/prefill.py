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
from tl_backend.ops.decode import merged_problem
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
    """One launch, or two with a combine.

    ``extras`` are the addresses of lse, sinks, slopes, k_scale and v_scale, 0 for what there is not.
    ``k`` and ``v`` are both the cache; or contiguous, with cu_seqlens_k for ``block_table``.
    """
    launches.record(plan.kind, plan.source)
    pieces = plan.pieces
    values: tuple[int, ...] = (v.data_ptr(),)
    scratch: tuple[int, ...] = ()
    num_blocks: tuple[int, ...] = ()
    v_strides = strides.v
    lse, sinks = extras[:2]
    if pieces is not None:  # The family has no use for V apart from the cache, nor for slopes.
        values, v_strides, extras, num_blocks = (), (), (lse, sinks, *extras[3:]), (k.shape[0],)
        scratch = (pieces.counter.data_ptr(), pieces.partial_o.data_ptr(), pieces.partial_lse.data_ptr())
    plan.kernel(
        q.data_ptr(),
        k.data_ptr(),
        *values,
        out.data_ptr(),
        *extras,
        block_table.data_ptr(),
        cu_seqlens_q.data_ptr(),
        seq_lens.data_ptr(),
        plan.work.data_ptr(),
        *scratch,
        plan.num_work,
        q.shape[0],
        *num_blocks,
        block_table.shape[-1],
        softmax_scale,
        *strides.q,
        *strides.k,
        *v_strides,
        *strides.out,
        strides.block_table,
        strides.lse,
    )
    if pieces is not None and pieces.combine is not None:
        launches.record(COMBINE)
        pieces.combine(
            out.data_ptr(),
            lse,
            sinks,
            cu_seqlens_q.data_ptr(),
            pieces.split.data_ptr(),
            pieces.partial_o.data_ptr(),
            pieces.partial_lse.data_ptr(),
            pieces.split.shape[0],
            pieces.tokens_per_tile,
            *strides.out,
            strides.lse,
        )
