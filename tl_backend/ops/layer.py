"""One layer's launches in a step: checked and put together once for all layers whose tensors look the same.

What changes from layer to layer is read at every call: the addresses of queries, keys, values, output, scales and the
like, which are made anew, or may be put elsewhere. What belongs to the step is read once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tl_backend.device import DeviceSpec
from tl_backend.ops.checks import Strides, address_mask, kernel_strides
from tl_backend.ops.decode import DecodePlan, Tails, decode_tails, launch_decode
from tl_backend.ops.prefill import PrefillPlan, launch_prefill, prefill_tails

# Of one plan. A model has a few kinds of layers; who plans once for many steps must not fill the memory.
MAX_LAYERS = 64


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What the launches of layers share.

    Attributes:
        decode, decode_tails: with what a launch passes beside the layer's addresses; None where there is no decode.
        prefill, prefill_tails: the same.
        end: output rows from here on become zero; None if there is none.
        mask: bits that no address of q, keys, values and output has, or each is checked by itself.
        names: of these four, for messages.
        spec: of the device.
        step: the tensors whose addresses the tails hold, and whose ``id`` a plan knows this by: both hold while the
            tensors live.
    """

    decode: DecodePlan | None
    decode_tails: Tails | None
    prefill: PrefillPlan | None
    prefill_tails: Tails | None
    end: int | None
    mask: int
    names: tuple[str, str, str, str]
    spec: DeviceSpec
    step: tuple[torch.Tensor, ...]

    def launch(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        *extras: torch.Tensor | None,
    ) -> torch.Tensor:
        """Launch all kernels, and return ``out``. ``extras`` are lse, sinks, slopes, k_scale and v_scale."""
        if self.end is not None:
            out[self.end :].zero_()
        if self.decode is None and self.prefill is None:
            return out
        q_at, k_at, out_at = q.data_ptr(), k.data_ptr(), out.data_ptr()
        v_at = k_at if v is k else v.data_ptr()
        if (q_at | k_at | v_at | out_at) & self.mask:
            for name, tensor in zip(self.names, (q, k, v, out), strict=True):
                kernel_strides(name, tensor, self.spec)
        extras_at = tuple([0 if tensor is None else tensor.data_ptr() for tensor in extras])
        if self.decode is not None and self.decode_tails is not None:
            launch_decode(self.decode, self.decode_tails, q_at, k_at, out_at, extras_at)
        if self.prefill is not None and self.prefill_tails is not None:
            launch_prefill(self.prefill, self.prefill_tails, q_at, k_at, v_at, out_at, extras_at)
        return out


def make_layer(
    decode: DecodePlan | None,
    prefill: PrefillPlan | None,
    num_rows: int,
    tensors: dict[str, torch.Tensor],
    step: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    softmax_scale: float,
    lse: torch.Tensor | None,
    spec: DeviceSpec,
) -> Layer:
    """Check strides and addresses, and put together what the launches of such layers share.

    Args:
        num_rows: query rows of the step.
        tensors: q, kv_cache and out by name, or q, k, v and out.
        step: block_table, cu_seqlens_q and seq_lens; without pages cu_seqlens_k for both others than cu_seqlens_q.

    Raises:
        InvalidInputError: a tensor's last dimension is not dense, or its rows do not lie at multiples of 16 bytes.
    """
    q, is_paged = tensors["q"], "kv_cache" in tensors
    names = ("q", "kv_cache", "kv_cache", "out") if is_paged else ("q", "k", "v", "out")
    decode_passes = prefill_passes = None
    if decode is not None or prefill is not None:
        by_name = {name: kernel_strides(name, tensor, spec) for name, tensor in tensors.items()}
        strides = Strides(
            q=by_name["q"],
            k=by_name["kv_cache"] if is_paged else (*by_name["k"], 0),
            v=(0, 0) if is_paged else by_name["v"],
            out=by_name["out"],
            block_table=step[0].stride(0) if is_paged else 1,
            lse=0 if lse is None else lse.stride(0),
        )
        if decode is not None:
            decode_passes = decode_tails(decode, *step, q.shape[0], softmax_scale, strides)
        if prefill is not None:
            num_blocks = tensors[names[1]].shape[0]
            prefill_passes = prefill_tails(prefill, *step, q.shape[0], num_blocks, softmax_scale, strides)
    return Layer(
        decode=decode,
        decode_tails=decode_passes,
        prefill=prefill,
        prefill_tails=prefill_passes,
        end=num_rows if num_rows < q.shape[0] else None,
        mask=address_mask(tensors.values(), spec),
        names=names,
        spec=spec,
        step=step,
    )
