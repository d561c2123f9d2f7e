"""What ``benchmarks.prefill`` measures: its rows, and the peer of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tl_backend.measure.answers import Answers
from tl_backend.measure.peers import Field, peers_of
from tl_backend.measure.peers_vllm import flash_attention_3_16_bit, triton
from tl_backend.measure.workload import Batch, Workload, problem

PAGES = (16, 64, 128)
VARLEN = (100, 2000, 513, 3000, 77, 1500)
FA3, TRITON = "fa3", "triton"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of every page size.

    Attributes:
        name: of its rows.
        shape: query heads, kv heads, head size.
        query_lens, seq_lens: of its requests.
        features: further fields of the problem.
    """

    name: str
    shape: tuple[int, int, int] = (32, 8, 128)
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    features: dict[str, Any] = field(default_factory=dict)

    def workload(self, page_size: int) -> Workload:
        """The row of a page size."""
        found = replace(problem(*self.shape, page_size), **self.features)
        return Workload(name=self.name, problem=found, query_lens=self.query_lens, seq_lens=self.seq_lens)


def _prefill(name: str, length: int, *shape: int, requests: int = 1, **features: Any) -> Case:
    lens = (length,) * requests
    size = shape or (32, 8, 128)
    return Case(name=name, shape=(size[0], size[1], size[2]), query_lens=lens, seq_lens=lens, features=features)


def _extend(name: str, requests: int, new: int, context: int) -> Case:
    return Case(name=name, query_lens=(new,) * requests, seq_lens=(context,) * requests)


CASES = (
    *(_prefill(f"B1 S{length}", length) for length in (512, 2048, 8192, 32768)),
    _prefill("B4 S2048", 2048, requests=4),
    _prefill("B16 S512", 512, requests=16),
    _extend("2048 new at 32768", 1, 2048, 32768),
    _extend("4 x 512 new at 8192", 4, 512, 8192),
    _extend("32 x 64 new at 1024", 32, 64, 1024),
    Case(name="varlen 77-3000", query_lens=VARLEN, seq_lens=VARLEN),
    _prefill("28/4 S4096", 4096, 28, 4, 128),
    _prefill("8/1 S16384", 16384, 8, 1, 128),
    _prefill("32/32 S4096", 4096, 32, 32, 128),
    # gpt-oss's layers, and Gemma 2's cap.
    _prefill("D64 window sinks S8192", 8192, 64, 8, 64, window=128, sinks_dtype="bfloat16"),
    _prefill("D64 S8192", 8192, 64, 8, 64),
    _prefill("D256 soft cap S8192", 8192, 16, 8, 256, soft_cap=50.0),
    _prefill("D96 S4096", 4096, 32, 8, 96),
    _prefill("fp8 KV S8192", 8192, kv_dtype="float8_e4m3fn"),
)


def chosen(words: Iterable[str]) -> tuple[Case, ...]:
    """The cases in whose name one of the words is found, in any case; all of them without words."""
    wanted = [word.lower() for word in words]
    return tuple(case for case in CASES if not wanted or any(word in case.name.lower() for word in wanted))


def peer_of(batch: Batch, answers: Answers) -> Field:
    """FA3 as vLLM calls it; where it has not a feature of the problem, vLLM's Triton kernel."""
    found = peers_of(batch, answers, {FA3: flash_attention_3_16_bit})
    p = batch.workload.problem
    plain = p.window is None and p.soft_cap is None and p.sinks_dtype is None and not p.is_quantized
    if found.peers or plain:  # FA3 serves a plain problem, or is not there at all.
        return found
    other = peers_of(batch, answers, {TRITON: triton})
    return Field(peers=other.peers, absent={**found.absent, **other.absent})
