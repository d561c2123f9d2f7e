"""The program that the benchmarks share: compile, measure, print, write."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from tl_backend.device import DeviceSpec
from tl_backend.measure.ceilings import ceilings
from tl_backend.measure.results import write_results
from tl_backend.measure.workload import Workload
from tl_backend.ops.compiled import KINDS
from tl_backend.ops.prepare import fill_disk_cache, required_kernels
from tl_backend.problem import AttentionProblem

DEVICE = torch.device("cuda")


def compile_all(problems: Iterable[AttentionProblem], kinds: tuple[str, ...] = KINDS) -> None:
    """Compile the kernels of these kinds for all problems side by side, into the disk cache.

    Raises:
        SystemExit: one does not compile.
    """
    spec = DeviceSpec.of(DEVICE)
    keys = [key for p in dict.fromkeys(problems) for key in required_kernels(p, spec) if key.kind in kinds]

    def show(done: int, total: int, kind: str) -> None:
        print(f"\rcompiled {done} of {total} kernels, last a {kind} ", end="", flush=True)

    errors = fill_disk_cache(keys, on_progress=show)
    print()
    if errors:
        raise SystemExit("\n".join(errors.values()))


def run(
    description: str,
    workloads: list[Workload],
    kinds: tuple[str, ...],
    measure: Callable[[Workload], dict[str, Any]],
    show: Callable[[dict[str, Any], dict[str, float]], str],
) -> None:
    """The program of a benchmark: compile, measure the ceilings and every workload, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    out = parser.parse_args().out
    compile_all((workload.problem for workload in workloads), kinds)
    ceiling, rows = ceilings(), []
    print(f"matmul {ceiling['matmul_tflops']:.0f} TFLOP/s, copy {ceiling['copy_tbps']:.2f} TB/s")
    for workload in workloads:
        row = measure(workload)
        rows.append(row)
        peer = f"  {row['times_fa3']['median']:.2f} x FA3" if "times_fa3" in row else ""
        print(show(row, ceiling) + peer, flush=True)
    if out is not None:
        write_results(out, rows, ceiling, DEVICE)
