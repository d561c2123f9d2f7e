"""Peers: who is there answers right, and who is not says why; on a CPU that is torch's."""

import pytest
import torch

from tl_backend.measure import peers as module
from tl_backend.measure.answers import Answers
from tl_backend.measure.peer import NotThereError, Peer
from tl_backend.measure.peers import PEERS, peers_of
from tl_backend.measure.workload import Batch, Workload
from tl_backend.testing.cases import make_problem

CPU = torch.device("cpu")
FLASH = "sdpa-flash"


def field_of(problem, query_lens, seq_lens=None):
    workload = Workload(name="a test", problem=problem, query_lens=query_lens, seq_lens=seq_lens or query_lens)
    batch = Batch(workload, CPU)
    return peers_of(batch, Answers(batch))


@pytest.mark.parametrize(
    ("problem", "query_lens", "seq_lens"),
    [
        (make_problem(4, 2, 32, 16), (37, 37), None),
        (make_problem(4, 4, 32, None), (64,), None),
        (make_problem(4, 1, 32, None, causal=False), (20,), (70,)),
        (make_problem(4, 2, 32, 16), (1, 1, 1), (50, 50, 50)),
    ],
    ids=["paged", "contiguous", "full with a context", "decode"],
)
def test_torch_answers_what_the_batch_asks(problem, query_lens, seq_lens) -> None:
    found = field_of(problem, query_lens, seq_lens)
    assert found.peers.keys() == {FLASH}
    assert found.absent.keys() == PEERS.keys() - {FLASH}
    assert "flash_attention" in found.peers[FLASH].what


@pytest.mark.parametrize(
    ("problem", "query_lens", "seq_lens", "reason"),
    [
        (make_problem(4, 2, 32, 16), (5, 6), None, "requests of one length"),
        (make_problem(4, 2, 32, 16), (5, 5), (9, 9), "contexts are not served"),
        (make_problem(4, 2, 32, 16, window=4, soft_cap=3.0), (5,), None, "not asked for window, soft cap"),
    ],
    ids=["ragged", "context", "features"],
)
def test_what_torch_does_not_serve_is_said(problem, query_lens, seq_lens, reason) -> None:
    found = field_of(problem, query_lens, seq_lens)
    assert found.peers == {}
    assert reason in found.absent[FLASH]


def test_a_peer_that_raises_answers_wrong_or_writes_nothing_costs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def peer(output):
        return Peer(what="a test", launch=lambda: None, output=output)

    def refuse(batch):
        raise NotThereError("it is not installed")

    def launch():
        raise RuntimeError("CUDA error\nand its trace")

    monkeypatch.setattr(
        module,
        "PEERS",
        {
            "right": lambda batch: peer(batch.reference),
            "wrong": lambda batch: peer(lambda: batch.reference() * 1.01),
            "silent": lambda batch: peer(batch.new_out),
            "broken": lambda batch: Peer(what="a test", launch=launch, output=batch.new_out),
            "absent": refuse,
        },
    )
    found = field_of(make_problem(4, 2, 32, 16), (20,))
    assert found.peers.keys() == {"right"}
    assert found.absent["wrong"].startswith("its answer is off by 1.0e-02")
    assert found.absent["silent"].startswith("its answer is off by nan")
    assert found.absent["broken"] == "RuntimeError: CUDA error"
    assert found.absent["absent"] == "it is not installed"
