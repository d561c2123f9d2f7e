"""The program that the benchmarks share: compile, measure, print, write."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from tl_backend.device import DeviceSpec
from tl_backend.measure.ceilings import ceiling_kernels, ceilings
from tl_backend.measure.results import document, write_results
from tl_backend.measure.rows import TILELANG, Kernel, Row, measure_row
from tl_backend.measure.workload import Workload
from tl_backend.ops.compiled import KINDS, KernelKey
from tl_backend.ops.prepare import load_kernels, required_kernels
from tl_backend.problem import AttentionProblem

DEVICE = torch.device("cuda")


def compile_all(
    problems: Iterable[AttentionProblem], kinds: tuple[str, ...] = KINDS, *, others: Iterable[KernelKey] = ()
) -> None:
    """Compile the kernels of these kinds for all problems side by side, and others, and load them.

    Raises:
        SystemExit: one does not compile, and is not among the others.
    """
    spec = DeviceSpec.of(DEVICE)
    keys = [key for p in dict.fromkeys(problems) for key in required_kernels(p, spec) if key.kind in kinds]
    errors = load_all([*keys, *others])
    if fatal := [message for key, message in errors.items() if key in keys]:
        raise SystemExit("\n".join(fatal))


def load_all(keys: Iterable[KernelKey]) -> dict[KernelKey, str]:
    """Compile kernels side by side where they are not in the kernel cache, and load them here.

    Returns:
        The error of each kernel that did not compile.
    """

    def show(done: int, total: int, kind: str) -> None:
        print(f"\rcompiled {done} of {total} kernels, last a {kind} ", end="", flush=True)

    errors = load_kernels(keys, on_progress=show)
    print()
    return errors


def run(
    description: str,
    workloads: list[Workload],
    kinds: tuple[str, ...],
    figures: Callable[[Kernel], str],
    *,
    cold: bool = False,
) -> None:
    """The program of a benchmark: compile, measure the ceilings and every workload, print, and write JSON if asked.

    Args:
        kinds: of the kernels that the workloads run.
        figures: of this package's kernel, for people.
        cold: empty the L2 cache before each launch.

    Raises:
        SystemExit: an answer is wrong: the times would mean nothing.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    out = parser.parse_args().out
    others = ceiling_kernels(DeviceSpec.of(DEVICE), workloads[0].problem.dtype)
    compile_all((workload.problem for workload in workloads), kinds, others=others)
    ceiling, rows = ceilings(DEVICE), []
    print(f"matmul {ceiling.matmul_tflops:.0f} TFLOP/s, copy {ceiling.copy_tbps:.2f} TB/s")
    for workload in workloads:
        row = measure_row(workload, DEVICE, ceiling, cold=cold)
        if row.problems is not None:
            raise SystemExit(f"{workload.name}, page {workload.problem.page_size}: {row.problems}")
        rows.append(row)
        print(_line(row, figures), flush=True)
    if out is not None:
        write_results(out, document(rows, ceiling, DEVICE))


def _line(row: Row, figures: Callable[[Kernel], str]) -> str:
    own = row.kernels[TILELANG]
    peers = "".join(f"  {times['median']:.2f} x {name}" for name, times in row.times.items())
    shown = f"{row.name:22} page {row.problem.page_size:<4} {own.us:9.1f} us  {figures(own)}"
    return f"{shown}  {own.of_roofline:4.0%} of roofline{peers}"
