"""What a candidate must pass before it is timed: the right answer, twice the same, whatever the unused slots hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tl_backend.configs.choice import Chooser
from tl_backend.measure.timing import Launch, relative_rms
from tl_backend.measure.workload import Workload
from tl_backend.problem import AttentionProblem
from tl_backend.tuner.batches import CacheBatch, num_pages, random_cache

# Relative RMS of the worst request, as the tests have it: twice what rounding the output and the weights gives.
TOLERANCES = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 4e-3}
_BITS = {4: torch.int32, 2: torch.int16}
SEED = 17


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A batch. Attributes: lens: (new tokens, keys) of each request; num_splits: a cap on the pieces of a decode's."""

    lens: tuple[tuple[int, int], ...]
    num_splits: int | None = None


# Odd, and at the ends of tiles and pages; a decode row that the prefill must serve; one of several tiles of rows and of
# keys; and few tiles of many keys, which Hopper's prefill cuts. Decodes that write the output, and few enough to be
# cut, one of them into more pieces than it has tiles.
SAMPLES = {
    "prefill": (
        Sample(lens=((5, 5), (130, 301), (1, 77), (17, 128), (200, 661))),
        Sample(lens=((9, 3001), (2, 50))),
    ),
    "decode": (
        Sample(lens=((1, 1), (1, 131), (1, 64), (1, 1000), (1, 2049)), num_splits=1),
        Sample(lens=((1, 2049), (1, 33))),
    ),
}


class Gate:
    """The sample batches of a kind and their references, made once."""

    def __init__(self, kind: str, problem: AttentionProblem, device: torch.device) -> None:
        torch.manual_seed(SEED)
        self._checks = [_Check(sample, problem, device) for sample in SAMPLES[kind]]

    def refusal(self, chooser: Chooser) -> str | None:
        """Why a config does not pass, or None."""
        for check in self._checks:
            if (reason := check.refusal(chooser)) is not None:
                return reason
        return None


class _Check:
    def __init__(self, sample: Sample, problem: AttentionProblem, device: torch.device) -> None:
        self._sample, self._tolerance = sample, TOLERANCES[problem.dtype]
        query_lens, seq_lens = zip(*sample.lens, strict=True)
        workload = Workload(name="sample", problem=problem, query_lens=query_lens, seq_lens=seq_lens)
        self._batch = CacheBatch(workload, random_cache(problem, num_pages(workload) + 1, device))
        self._wanted = self._batch.reference()
        self._batch.poison()

    def refusal(self, chooser: Chooser) -> str | None:
        plan = self._batch.plan(chooser, num_splits=self._sample.num_splits)
        for scratch in (plan.decode, None if plan.prefill is None else plan.prefill.pieces):
            if scratch is not None:
                scratch.partial_o.fill_(math.nan)
                scratch.partial_lse.fill_(math.nan)
        launch, out = self._batch.tilelang(plan=plan)
        first = _run(launch, out)
        if (reason := self._wrong(first)) is not None:
            return reason
        bits = _BITS[out.element_size()]
        if (changed := int((first.view(bits) != _run(launch, out).view(bits)).sum())) > 0:
            return f"{changed} of {out.numel()} output elements differ in a second run; the limit is 0"
        return None

    def _wrong(self, out: torch.Tensor) -> str | None:
        if (bad := int((~out.isfinite()).sum())) > 0:
            return f"{bad} of {out.numel()} output elements are not finite; the limit is 0"
        start = 0
        for query_len, seq_len in self._sample.lens:
            rows = slice(start, start + query_len)
            start += query_len
            error = relative_rms(out[rows], self._wanted[rows])
            if not error <= self._tolerance:
                return (
                    f"relative RMS {error:.2e} in the request of {query_len} new tokens and {seq_len} keys; "
                    f"the limit is {self._tolerance:.0e}"
                )
        return None


def _run(launch: Launch, out: torch.Tensor) -> torch.Tensor:
    out.fill_(math.nan)
    launch()
    return out.clone()
