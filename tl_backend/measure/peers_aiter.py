"""AITER, AMD's attention."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from tl_backend.measure.peer import NotThereError, Peer, refuse_features
from tl_backend.measure.workload import Batch


def import_first() -> None:
    """Import it if it is there, before anything of TileLang is: TileLang's stand-ins for HIP's symbols break it."""
    if torch.version.hip and importlib.util.find_spec("aiter") is not None:
        importlib.import_module("aiter")


def flash_attention(batch: Batch) -> Peer:
    """Its varlen attention on contiguous keys and values, which are gathered out of a cache beforehand.

    Raises:
        NotThereError: it is not installed, or the device is not AMD's.
    """
    p = batch.workload.problem
    refuse_features(batch)
    if batch.device.type == "cpu" or not torch.version.hip:
        raise NotThereError("it needs an AMD GPU")
    if importlib.util.find_spec("aiter") is None:
        raise NotThereError("aiter is not installed")
    import aiter as library

    requests = [batch.keys_and_values(request) for request in range(len(batch.workload.seq_lens))]
    keys, values = (torch.cat(side).contiguous() for side in zip(*requests, strict=True))
    q, scale = batch.q.contiguous(), p.head_dim**-0.5
    last: list[torch.Tensor] = []

    def launch() -> None:
        found = library.flash_attn_varlen_func(
            q, keys, values, batch.starts, batch.key_starts, batch.max_q, batch.max_k,
            softmax_scale=scale, causal=p.causal,
        )  # fmt: skip
        last[:] = [found[0] if isinstance(found, tuple) else found]

    return Peer(
        what=f"AITER {getattr(library, '__version__', 'of an unknown version')}, contiguous",
        launch=launch,
        output=lambda: last[0],
    )
