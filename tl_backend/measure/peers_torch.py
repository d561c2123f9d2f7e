"""torch's scaled_dot_product_attention, each of its programs by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tl_backend.measure.peer import NotThereError, Peer, refuse_features
from tl_backend.measure.workload import Batch

_PROGRAMS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def sdpa(batch: Batch, program: SDPBackend) -> Peer:
    """On dense ``[R, H, S, D]``, which are gathered out of the cache beforehand and not charged.

    Raises:
        NotThereError: the requests differ in length, or are causal with a context, which torch aligns at the top left.
    """
    p, workload = batch.workload.problem, batch.workload
    refuse_features(batch)
    if program != SDPBackend.FLASH_ATTENTION and batch.device.type == "cpu":
        raise NotThereError("it needs a GPU")
    query_len, seq_len = workload.query_lens[0], workload.seq_lens[0]
    if set(workload.query_lens) != {query_len} or set(workload.seq_lens) != {seq_len}:
        raise NotThereError("requests of one length are needed")
    if p.causal and query_len not in (1, seq_len):
        raise NotThereError("its causal mask begins at the first key: contexts are not served")
    requests = [batch.keys_and_values(request) for request in range(len(workload.seq_lens))]
    keys, values = (torch.stack(side).transpose(1, 2).contiguous() for side in zip(*requests, strict=True))
    q = batch.q.reshape(len(requests), query_len, p.num_q_heads, p.head_dim).transpose(1, 2).contiguous()
    is_causal, enable_gqa = p.causal and query_len > 1, p.group_size > 1
    last: list[torch.Tensor] = []

    def launch() -> None:
        with sdpa_kernel(program):
            last[:] = [scaled_dot_product_attention(q, keys, values, is_causal=is_causal, enable_gqa=enable_gqa)]

    return Peer(
        what=f"torch {torch.__version__} {program.name.lower()}",
        launch=launch,
        output=lambda: last[0].transpose(1, 2).reshape(batch.q.shape),
    )


PEERS: dict[str, Callable[[Batch], Peer]] = {
    name: partial(sdpa, program=program) for name, program in _PROGRAMS.items()
}
