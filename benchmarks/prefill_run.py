"""Measures the rows of ``benchmarks.prefill``, and keeps what is done whatever happens."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.prefill_cases import Case, peer_of
from benchmarks.prefill_goals import (
    LARGE_PAGE,
    LAYERS,
    MATMUL,
    OTHER_PAGE,
    SHARE_ROWS,
    SMALL_PAGE,
    peer_ratio,
    with_host,
)
from benchmarks.program import load_all
from benchmarks.variants import variant_chooser
from tl_backend.configs.choice import Chooser, FixedChooser
from tl_backend.device import DeviceSpec
from tl_backend.errors import TLBackendError
from tl_backend.measure.answers import Answers
from tl_backend.measure.ceilings import Ceilings, ceiling_kernels, ceilings
from tl_backend.measure.results import document, write_results
from tl_backend.measure.rows import TILELANG, Method, Row, Variant, measure_batch
from tl_backend.measure.timing import Launch
from tl_backend.measure.workload import Batch, Workload
from tl_backend.ops.choices import chooser_for
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.prepare import required_kernels
from tl_backend.problem import AttentionProblem

# A matmul takes turns with the rows whose share of its rate is a goal.
MATMUL_SIZE = {"cuda": 8192, "cpu": 64}


class Run:
    """One run.

    Args:
        device: that it is on.
        cases, pages: the rows. Of a case the largest page comes first, and lies beside the smallest.
        method: of each row; its layers and peers are this benchmark's.
        variants: overrides of a config's fields, by name.
        out: where the rows are written, after each.
        takes_defaults: the family's default configs instead of the device's table.
        row_timeout_s: after that a row hangs: the process ends, for no launch can be taken back.
    """

    def __init__(
        self,
        device: torch.device,
        cases: Sequence[Case],
        pages: Sequence[int],
        *,
        method: Method,
        variants: Mapping[str, Mapping[str, Any]],
        out: Path | None,
        takes_defaults: bool,
        row_timeout_s: float,
    ) -> None:
        self.device, self.spec = device, DeviceSpec.of(device)
        self.cases, self.pages = cases, sorted(pages, reverse=True)
        self.method = dataclasses.replace(method, layers=LAYERS, field_of=peer_of)
        self.variants, self.out = variants, out
        self.takes_defaults, self.row_timeout_s = takes_defaults, row_timeout_s
        self.rows: list[Row] = []
        self.configs: dict[str, list[str]] = {}
        self.seconds: dict[str, float] = {}
        self.ceilings: Ceilings | None = None
        self._broken: dict[KernelKey, str] = {}
        self._lost: str | None = None
        self._matmul: Launch | None = None

    def compile(self) -> None:
        """All kernels, side by side."""
        workloads = [case.workload(page) for case in self.cases for page in self.pages]
        keys = ceiling_kernels(self.spec, workloads[0].problem.dtype)
        for problem in dict.fromkeys(workload.problem for workload in workloads):
            for overrides in (None, *self.variants.values()):
                with suppress(TLBackendError):  # The row says it.
                    chooser = self._chooser(problem) if overrides is None else self._variant(problem, overrides)
                    keys += self._keys(problem, chooser)
        self._broken = load_all(keys)

    def measure(self, *, own_ceilings: bool = True) -> None:
        """The ceilings, then every row."""
        with self._timed("ceilings"), self._watched("ceilings"):
            found = self.ceilings = ceilings(self.device, own=own_ceilings)
        print(f"matmul {found.matmul_tflops:.0f} TFLOP/s, copy {found.copy_tbps:.2f} TB/s", flush=True)
        for case in self.cases:
            self._measure_case(case, found)

    def document(self) -> dict[str, Any]:
        """What is measured so far."""
        return {
            **document(self.rows, self.ceilings or _nothing(), self.device),
            "matmul_flops": 2.0 * MATMUL_SIZE[self.device.type] ** 3,
            "layers": LAYERS,
            "configs": self.configs,
            "variants": {name: dict(overrides) for name, overrides in self.variants.items()},
            "seconds": {name: round(seconds, 2) for name, seconds in self.seconds.items()},
        }

    def _measure_case(self, case: Case, found: Ceilings) -> None:
        first: Batch | None = None
        answers: Answers | None = None
        large: Launch | None = None
        for page in self.pages:
            workload = case.workload(page)
            title = f"{workload.name}, page {page}"
            with self._watched(title, workload):
                try:
                    if self._lost is not None:
                        raise RuntimeError(f"not run: the device was lost in {self._lost}")
                    with self._timed("tensors and answers"):
                        batch = Batch(workload, self.device, like=first)
                        answers = answers or Answers(batch)
                        first = first or batch
                    with self._timed("measuring"):
                        beside = self._beside(workload, large)
                        row = self._row(batch, answers, found, beside)
                    if page == LARGE_PAGE and row.problems is None:
                        large = batch.tilelang(self._chooser(workload.problem))[0]
                except Exception as error:  # noqa: BLE001
                    row = Row.of(workload, problems=f"{type(error).__name__}: {str(error)[:500]}")
                self._check_device(title, row)
            self._add(row)

    def _row(self, batch: Batch, answers: Answers, found: Ceilings, beside: dict[str, Launch]) -> Row:
        problem = batch.workload.problem
        chooser = self._chooser(problem)
        self.configs[f"{batch.workload.name}, page {problem.page_size}"] = [
            str(config) for config in chooser.configs("prefill")
        ]
        if (reason := self._broken_reason(problem, chooser)) is not None:
            return Row.of(batch.workload, problems=reason)
        choosers, refused = {}, {}
        for name, overrides in self.variants.items():
            try:
                candidate = self._variant(problem, overrides)
            except TLBackendError as error:
                refused[name] = Variant(problems=str(error))
                continue
            if (reason := self._broken_reason(problem, candidate)) is not None:
                refused[name] = Variant(problems=reason)
            else:
                choosers[name] = candidate
        row = measure_batch(batch, answers, found, self.method, chooser=chooser, variants=choosers, beside=beside)
        return dataclasses.replace(row, variants={**refused, **row.variants})

    def _beside(self, workload: Workload, large: Launch | None) -> dict[str, Launch]:
        page, found = workload.problem.page_size, {}
        if page == SMALL_PAGE and large is not None:
            found[OTHER_PAGE] = large
        if page == LARGE_PAGE and workload.name in SHARE_ROWS:
            found[MATMUL] = self._matmul = self._matmul or _matmul(self.device)
        return found

    def _chooser(self, problem: AttentionProblem) -> Chooser:
        return FixedChooser(problem, self.spec) if self.takes_defaults else chooser_for(problem, self.spec)

    def _variant(self, problem: AttentionProblem, overrides: Mapping[str, Any]) -> Chooser:
        return variant_chooser(problem, self.spec, dict(overrides))

    def _keys(self, problem: AttentionProblem, chooser: Chooser) -> list[KernelKey]:
        """Of the prefill, whatever its family, and of what follows it."""
        keys = required_kernels(problem, self.spec, chooser=chooser)
        return [key for key in keys if key.kind.startswith("prefill")]

    def _broken_reason(self, problem: AttentionProblem, chooser: Chooser) -> str | None:
        reasons = (self._broken.get(key) for key in self._keys(problem, chooser))
        return next((reason for reason in reasons if reason is not None), None)

    def _check_device(self, title: str, row: Row) -> None:
        """After a failure: whether anything can still run."""
        if row.problems is None or self.device.type == "cpu" or self._lost is not None:
            return
        try:
            torch.cuda.synchronize()
        except Exception:  # noqa: BLE001
            self._lost = title

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        for line in lines(dataclasses.asdict(row)):
            print(line, flush=True)
        if self.out is not None:
            write_results(self.out, self.document())

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - begun

    @contextmanager
    def _watched(self, title: str, workload: Workload | None = None) -> Iterator[None]:
        """Ends the process where the block takes too long: a kernel that hangs cannot be stopped otherwise."""

        def end() -> None:
            reason = f"it hangs: not done after {self.row_timeout_s:.0f} s"
            if workload is not None:
                self._add(Row.of(workload, problems=reason))
            print(f"{title}: {reason}; the run ends", flush=True)
            os._exit(1)

        timer = threading.Timer(self.row_timeout_s, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def lines(row: dict[str, Any]) -> list[str]:
    """A row in terms of JSON, for people; each variant in a line of its own."""
    title = f"{row['name']:22} page {row['problem']['page_size']:<4}"
    if row["problems"] is not None:
        return [f"{title} FAILED: {row['problems']}"]
    own, measured = row["kernels"][TILELANG], peer_ratio(row)
    shown = f"{title} {own['us']:9.1f} us {own['tflops']:5.0f} TFLOP/s {own['of_roofline']:4.0%} of roofline"
    if measured is None:
        shown += f"  NO PEER: {'; '.join(row['absent'].values())}"
    else:
        name, ratio = measured
        host = with_host(row, name)
        shown += f"  {_shown(ratio)} x {name}" + ("" if host is None else f", with host {host:.3f}")
    for name, ratio in row["beside"].items():
        shown += f"  {_shown(ratio)} x {name}"
    return [shown, *(f"    {name:40} {_variant(variant)}" for name, variant in row["variants"].items())]


def _variant(variant: dict[str, Any]) -> str:
    if variant["us"] is None:
        return f"not timed: {variant['problems']}"
    times = "  ".join(f"{_shown(ratio)} x {name}" for name, ratio in variant["times"].items())
    return f"{variant['us']:9.1f} us  {times}"


def _shown(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def _matmul(device: torch.device) -> Launch:
    size = MATMUL_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b.T, out=out)


def _nothing() -> Ceilings:
    return Ceilings(matmul_tflops=0.0, copy_tbps=0.0, dtype="", matmul={}, copy={}, best={})
