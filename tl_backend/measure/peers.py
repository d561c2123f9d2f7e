"""Other implementations of the same attention, on the tensors of a batch, checked before anybody times them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tl_backend.measure import peers_aiter, peers_torch, peers_vllm
from tl_backend.measure.answers import Answers
from tl_backend.measure.peer import NotThereError, Peer
from tl_backend.measure.workload import Batch

# In the order of the columns of a table.
PEERS: dict[str, Callable[[Batch], Peer]] = {
    **peers_torch.PEERS,
    "triton": peers_vllm.triton,
    "fa3": peers_vllm.flash_attention_3,
    "aiter": peers_aiter.flash_attention,
}


@dataclass(frozen=True, kw_only=True)
class Field:
    """Attributes: peers: that run here and answer right; absent: why each of the others is not among them."""

    peers: dict[str, Peer]
    absent: dict[str, str]


def peers_of(batch: Batch, answers: Answers, peers: Mapping[str, Callable[[Batch], Peer]] | None = None) -> Field:
    """Every peer that serves a batch here. One that raises or answers wrong costs itself, and says why.

    Args:
        peers: who is asked. Default: ``PEERS``.
    """
    found = Field(peers={}, absent={})
    for name, make in (PEERS if peers is None else peers).items():
        try:
            peer = make(batch)
            peer.launch()
            wrong = answers.problem_of(peer.output())
        except NotThereError as reason:
            wrong = str(reason)
        except Exception as error:  # noqa: BLE001
            wrong = f"{type(error).__name__}: {first_line(error)}"
        if wrong is None:
            found.peers[name] = peer
        else:
            found.absent[name] = wrong
    if batch.device.type == "cuda":
        torch.cuda.synchronize()
    return found


def first_line(error: BaseException) -> str:
    """The first line of a message, cut: torch's and Triton's hold stack traces."""
    return next(iter(str(error).splitlines()), "")[:300]
