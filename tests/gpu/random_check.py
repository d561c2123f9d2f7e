"""One random batch on two families of the prefill: what they must agree on, bit by bit and within rounding.

Under the rules of the poison harness, in workspaces that persist from batch to batch as a server's do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.gpu.random_cases import CPU_PROBLEMS, MAX_REQUESTS, MAX_TOKENS, PROBLEMS, Drawn, draw, shortened
from tl_backend.configs.choice import FixedChooser
from tl_backend.configs.prefill import default_prefill_config
from tl_backend.configs.prefill_hopper import default_hopper_config
from tl_backend.configs.tile import TileConfig
from tl_backend.device import DeviceSpec
from tl_backend.errors import TLBackendError
from tl_backend.ops import AttentionPlan, AttentionWorkspace, paged_attention
from tl_backend.ops.compiled import KERNELS, KernelKey
from tl_backend.ops.launcher import Artifact
from tl_backend.ops.prepare import required_kernels
from tl_backend.problem import AttentionProblem
from tl_backend.telemetry import launches
from tl_backend.testing.cases import Batch, make_batch
from tl_backend.testing.poison_judge import (
    TOLERANCES,
    PoisonError,
    check_same_bits,
    judge,
    num_different,
    worst_request,
)
from tl_backend.testing.poison_run import Attention, features_of, make_plan, reference, run_poisoned

FAMILIES = ("candidate", "portable")
NUM_STREAMS = 3


def config_of(family: str, problem: AttentionProblem, device: DeviceSpec) -> Any:
    """The candidate is Hopper's default; in a dry run, where there is none, another tile than the portable default."""
    if family == "portable":
        return default_prefill_config(problem, device)
    if device.is_gpu:
        return default_hopper_config(problem, device)
    return TileConfig(block_m=16, block_n=16, heads_per_tile=1, num_stages=0, threads=1)


def chooser_of(family: str, problem: AttentionProblem, device: DeviceSpec) -> FixedChooser:
    return FixedChooser(problem, device, prefill=config_of(family, problem, device))


def problems_of(device: DeviceSpec) -> tuple[AttentionProblem, ...]:
    return PROBLEMS if device.is_gpu else CPU_PROBLEMS


def keys_of(device: DeviceSpec) -> list[KernelKey]:
    """Every kernel of both families, once."""
    found = [
        key
        for problem in problems_of(device)
        for family in FAMILIES
        for key in required_kernels(problem, device, chooser=chooser_of(family, problem, device))
        if key.kind.startswith("prefill")
    ]
    return list(dict.fromkeys(found))


def drawn_of(seed: int, number: int, device: DeviceSpec) -> Drawn:
    """The batch of this number; problems take turns."""
    problems = problems_of(device)
    problem = problems[number % len(problems)]
    config = config_of("candidate", problem, device)
    return draw(seed, number, problem, keys=config.block_n, tokens=config.tokens_per_tile)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one batch.

    Attributes:
        apart: relative RMS of the worst request between the families; None where the check did not come so far.
        error: the same of the candidate against float64, where that was asked for.
        message: what is wrong; empty if nothing.
    """

    apart: float | None = None
    error: float | None = None
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Attributes: out: rows in one piece; lse: if the problem has it."""

    out: torch.Tensor
    lse: torch.Tensor | None


class Checker:
    """Checks batches, in workspaces of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.spec = device, DeviceSpec.of(device)
        self._workspaces: dict[tuple[str, AttentionProblem, bool], AttentionWorkspace] = {}
        self._streams = [torch.cuda.Stream(device) for _ in range(NUM_STREAMS)] if device.type == "cuda" else []
        self._turn = 0

    def check(self, drawn: Drawn, *, against_reference: bool) -> Outcome:
        """Run a batch; what goes wrong is in the outcome. Raises what leaves the device unusable."""
        try:
            return self._check(drawn, against_reference)
        except (AssertionError, TLBackendError, RuntimeError) as failure:
            self._workspaces.clear()  # A kernel that failed may have left anything there.
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return Outcome(message=f"{type(failure).__name__}: {failure}")

    def _check(self, drawn: Drawn, against_reference: bool) -> Outcome:
        problem, case = drawn.problem, drawn.case
        batch = make_batch(problem, case, self.device, seed=drawn.seed)
        bounds = None if drawn.slack is None else torch.tensor(case.seq_lens) + torch.tensor(drawn.slack)
        workspaces = {family: self._workspace(family, drawn) for family in FAMILIES}
        plans = {family: make_plan(batch, workspaces[family], bounds=bounds) for family in FAMILIES}

        def run(family: str, operation: Attention = paged_attention) -> Answer:
            _poison_scratch(workspaces[family])
            out = run_poisoned(batch, operation, plans[family])
            return Answer(out=out, lse=None if batch.lse is None else batch.lse.clone())

        wanted = None
        if against_reference:
            batch.poison(0.0, 0)
            wanted = reference(batch)
        batch.poison(math.nan, drawn.tail)
        portable = run("portable")
        first = run("candidate")
        apart = _judge(batch, first, portable)
        error = None if wanted is None else judge(batch, first.out, *wanted, TOLERANCES[problem.dtype]).error
        with self._next_stream():
            _check_same(batch, first, run("candidate"), "P6", "launched again")
            batch.poison(math.inf, -1 if drawn.tail == "stale" else "stale")
            _check_same(batch, first, run("candidate"), "P2/P3", "unwritten slots are infinite, table tails others")
        if drawn.captured and self._streams:
            replay = _captured(batch, plans["candidate"])
            _check_same(batch, first, run("candidate", replay), "P7", "replayed from a graph")
            _shorten(batch, shortened(drawn), drawn.tail)
            # The plan stays: its bounds are too large now, by more than the slack.
            apart = max(apart, _judge(batch, run("candidate", replay), run("portable")))
        return Outcome(apart=apart, error=error)

    def _workspace(self, family: str, drawn: Drawn) -> AttentionWorkspace:
        key = (family, drawn.problem, drawn.batch_invariant)
        if key not in self._workspaces:
            self._workspaces[key] = AttentionWorkspace(
                drawn.problem,
                self.device,
                max_num_reqs=MAX_REQUESTS,
                max_num_tokens=MAX_TOKENS,
                batch_invariant=drawn.batch_invariant,
                chooser=chooser_of(family, drawn.problem, self.spec),
            )
        return self._workspaces[key]

    @contextmanager
    def _next_stream(self) -> Iterator[None]:
        """Each batch's further launches on another stream, one after another."""
        if not self._streams:
            yield
            return
        stream, before = self._streams[self._turn % NUM_STREAMS], torch.cuda.current_stream(self.device)
        self._turn += 1
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            yield
        before.wait_stream(stream)


def _judge(batch: Batch, candidate: Answer, portable: Answer) -> float:
    """How far apart the families are.

    Raises:
        PoisonError: too far; then it has either one's error, too.
    """
    if batch.lse is not None and candidate.lse is not None:
        batch.lse.copy_(candidate.lse)
    tolerance = TOLERANCES[batch.problem.dtype]
    try:
        return judge(batch, candidate.out, portable.out.double(), _double(portable.lse), tolerance).error
    except PoisonError as failure:
        batch.visible_S.fill_(True)
        batch.poison(0.0, 0)
        wanted, _ = reference(batch)
        errors = [str(worst_request(batch.case, answer.out, wanted, tolerance)) for answer in (candidate, portable)]
        raise PoisonError(
            f"{failure} Against the portable family; against float64 the candidate has {errors[0]}, the portable "
            f"family {errors[1]}."
        ) from None


def _double(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.double()


def _poison_scratch(workspace: AttentionWorkspace) -> None:
    """Partial results; what counts or lists work is integers."""
    for tensor in vars(workspace).values():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.fill_(math.nan)


def _check_same(batch: Batch, first: Answer, again: Answer, rule: str, what: str) -> None:
    check_same_bits(batch, first.out, again.out, rule, what)
    if first.lse is None or again.lse is None:
        return
    if (changed := num_different(first.lse, again.lse)) > 0:
        raise PoisonError(f"{rule}: {changed} log-sum-exps changed when {what}; the limit is 0. {batch.case}")


def _captured(batch: Batch, plan: AttentionPlan) -> Attention:
    """The launch of a batch as a graph; what it is called with is what it was captured with."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        paged_attention(
            batch.q,
            batch.kv_cache,
            batch.block_table,
            batch.cu_seqlens_q,
            batch.seq_lens,
            max_seqlen_q=max(batch.case.query_lens),
            max_seqlen_k=max(batch.case.seq_lens),
            out=batch.out,
            softmax_scale=batch.case.softmax_scale,
            **features_of(batch),
            lse=batch.lse,
            plan=plan,
        )

    def replay(*_: object, **__: object) -> torch.Tensor:
        graph.replay()
        return batch.out

    return replay


def _shorten(batch: Batch, seq_lens: list[int], tail: Any) -> None:
    """Take keys off the ends of requests: the device's lengths change, the slots turn to poison."""
    page = batch.kv_cache.shape[2]
    positions = [torch.arange(length, device=batch.q.device) for length in batch.case.seq_lens]
    left = torch.tensor(seq_lens, device=batch.q.device)
    batch.visible_S = torch.cat(positions) < left[batch.request_S]  # A window moves with its queries: all are written.
    batch.num_pages = [-(-length // page) for length in seq_lens]
    batch.seq_lens.copy_(left)
    batch.poison(math.nan, tail)


def serve(connection: Connection) -> None:
    """Check what comes: first (seed, device, every, artifacts), then numbers, answered with outcomes, then None."""
    seed, device, every, artifacts = connection.recv()
    checker = Checker(torch.device(device))
    for key, artifact in artifacts.items():
        KERNELS.load(key, Artifact(*artifact))
    loaded = KERNELS.num_compiled
    connection.send(loaded)
    while (number := connection.recv()) is not None:
        drawn = drawn_of(seed, number, checker.spec)
        connection.send(checker.check(drawn, against_reference=number % every == 0))
    connection.send({"compiled late": KERNELS.num_compiled - loaded, **launches.counts()})
