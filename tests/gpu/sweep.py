"""The kernels on a GPU under the poison harness: 200 problems in float16 and bfloat16, and extremes.

Run ``python -m tests.gpu.sweep --out FILE.json``. On a Hopper a second run with ``--family portable`` has the problems
that Hopper's own prefill takes by the portable one; ``--family hopper`` is what the first run has of that family alone.
``--device cpu`` runs a handful on the C target, to try the program itself. Everything is compiled first, side by side,
into the kernel cache (``TL_BACKEND_CACHE_DIR``). Prints a table, writes it as JSON with the GPU and the versions,
and exits with 1 if any check missed.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.gpu.extremes import INT32_LIMIT, Extreme, extremes, kernel_keys
from tests.gpu.families import FAMILIES, forced_family, of_family, strangers
from tl_backend.device import DeviceSpec
from tl_backend.errors import TLBackendError
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.prepare import load_kernels
from tl_backend.telemetry.launches import counts
from tl_backend.testing.contiguous import check_varlen
from tl_backend.testing.poison import check_attention
from tl_backend.testing.poison_judge import TOLERANCES
from tl_backend.testing.poison_writes import check_cache_write
from tl_backend.testing.problems import Work, cpu_work, gpu_work, name
from tl_backend.testing.views import KV_LAYOUTS

DRY_LIMIT = 2**16


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table. ``message`` is empty if all is well."""

    problem: str
    case: str
    error: float | None
    tolerance: float | None
    message: str

    def __str__(self) -> str:
        numbers = "" if self.error is None else f"{self.error:.2e} <= {self.tolerance:.0e}"
        return f"{'MISS' if self.message else 'ok':4}  {self.problem:42}  {numbers:20}  {self.case}  {self.message}"


def everything(device: torch.device) -> tuple[list[Work], list[Extreme]]:
    """What runs on a device."""
    if device.type == "cpu":
        return cpu_work(), [extreme for extreme in extremes("float32") if not extreme.gpu_only]
    return gpu_work(), extremes("bfloat16")


def keys(work: list[Work], more: list[Extreme], device: DeviceSpec) -> list[KernelKey]:
    """Every kernel, once."""
    found = [key for item in (*work, *more) for key in kernel_keys(item.problem, item.kinds, device)]
    return list(dict.fromkeys(found))


def check_work(work: Work, device: torch.device) -> Iterator[Row]:
    """All cases of a problem. A problem's cache write is part of its ``kinds``."""
    tolerance = TOLERANCES[work.problem.dtype]
    for case in work.cases:
        error, message = None, ""
        try:
            check = check_attention if work.problem.is_paged else check_varlen
            error = check(work.problem, case, device).error
        except (AssertionError, TLBackendError, RuntimeError) as failure:
            message = f"{type(failure).__name__}: {failure}"
        yield Row(problem=name(work.problem), case=str(case), error=error, tolerance=tolerance, message=message)
    page = work.problem.page_size
    if page is not None and "cache_write" in work.kinds:
        slots = [
            0,
            page - 1,
            page,
            3 * page + 7,
            5 * page - 1,
            -1,
            5 * page,
            2**40 + 17,
            *range(2 * page, 2 * page + 14),
        ]
        for kv_layout in KV_LAYOUTS:
            message = ""
            try:
                check_cache_write(work.problem, slots, device, kv_layout=kv_layout)
            except (AssertionError, TLBackendError, RuntimeError) as failure:
                message = f"{type(failure).__name__}: {failure}"
            yield Row(
                problem=name(work.problem),
                case=f"cache write, {kv_layout}",
                error=None,
                tolerance=None,
                message=message,
            )


def check_extreme(extreme: Extreme, device: torch.device) -> Row:
    """One check of ``extremes``."""
    tolerance, error, message = TOLERANCES[extreme.problem.dtype], None, ""
    try:
        error = extreme.check(extreme.problem, device, DRY_LIMIT if device.type == "cpu" else INT32_LIMIT)
        if error > tolerance:
            message = "the error is over its limit"
    except (AssertionError, TLBackendError, RuntimeError) as failure:
        message = f"{type(failure).__name__}: {failure}"
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Row(problem=name(extreme.problem), case=extreme.name, error=error, tolerance=tolerance, message=message)


def machine(device: torch.device) -> dict[str, Any]:
    """What a figure must be read with."""
    driver = ""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        driver = answer.stdout.strip().splitlines()[0] if answer.stdout.strip() else ""
    return {
        "device": DeviceSpec.of(device).name,
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "tilelang": importlib.metadata.version("tilelang"),
        "python": sys.version.split()[0],
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda or cpu (a dry run of a handful)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile side by side")
    parser.add_argument("--only", default="", help="problems and checks whose name holds this")
    parser.add_argument("--every", type=int, default=1, help="take each n-th problem only")
    parser.add_argument("--always", default="(?!)", help="and every problem whose name matches this expression")
    parser.add_argument("--family", choices=FAMILIES, default="default", help="of the prefills")
    options = parser.parse_args(arguments)
    # The family's defaults: tests.gpu.table_rows checks what tables have. And one config for every regime: the harness
    # compares bits of plans that differ in what they know of a batch.
    os.environ["TL_BACKEND_TABLES"] = "0"
    device = torch.device(options.device)
    work, more = of_family(options.family, *everything(device), DeviceSpec.of(device))
    work = [item for item in work if options.only in name(item.problem)]
    work = [
        item
        for number, item in enumerate(work)
        if number % options.every == 0 or re.search(options.always, name(item.problem))
    ]
    more = [item for item in more if options.only in item.name or options.only in name(item.problem)]
    if not work and not more:
        parser.error(f"--family {options.family} and --only {options.only!r} leave nothing on this device")
    with forced_family(options.family):
        return _sweep(work, more, device, options)


def _sweep(work: list[Work], more: list[Extreme], device: torch.device, options: argparse.Namespace) -> int:
    """Compile, run and write; the exit code."""
    wanted = keys(work, more, DeviceSpec.of(device))
    print(f"{len(work)} problems, {len(more)} further checks, {len(wanted)} kernels", flush=True)
    begin = time.monotonic()
    failed = load_kernels(wanted, processes=options.processes, on_progress=_progress)
    compiled_s = time.monotonic() - begin
    rows = [
        Row(problem=name(key.problem), case=key.kind, error=None, tolerance=None, message=message)
        for key, message in failed.items()
    ]
    begin, before = time.monotonic(), counts()
    rows += _printed(row for item in work for row in check_work(item, device))
    rows += _printed(check_extreme(item, device) for item in more)
    launched = {kind: count - before.get(kind, 0) for kind, count in counts().items()}
    if stranger := strangers(options.family, launched):
        rows.append(Row(problem="all", case="family", error=None, tolerance=None, message=stranger))
        print(rows[-1])
    missed = [row for row in rows if row.message]
    summary = {
        **machine(device),
        "family": options.family,
        "launches": launched,
        "problems": len({row.problem for row in rows}),
        "checks": len(rows),
        "missed": len(missed),
        "kernels": len(wanted),
        "compile_s": round(compiled_s, 1),
        "run_s": round(time.monotonic() - begin, 1),
        "worst": {
            dtype: max(
                (row.error for row in rows if row.error is not None and f" {dtype} " in row.problem), default=None
            )
            for dtype in TOLERANCES
        },
    }
    print(json.dumps(summary, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps({**summary, "rows": [asdict(row) for row in rows]}, indent=1))
    return 1 if missed else 0


def _progress(done: int, total: int, kind: str) -> None:
    if done % 20 == 0 or done == total:
        print(f"compiled {done} of {total}", flush=True)


def _printed(rows: Iterator[Row]) -> Iterator[Row]:
    for row in rows:
        print(row, flush=True)
        yield row


if __name__ == "__main__":
    sys.exit(main())
