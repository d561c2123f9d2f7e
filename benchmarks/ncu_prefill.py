"""What limits the prefill: Nsight Compute on one launch of ours and one of FA3 for rows of ``benchmarks.prefill``.

Run ``python -m benchmarks.ncu_prefill --only "B1 S8192" --only D256 [--pages 128] [--out FILE.json]`` where ``ncu`` is.
Clocks are left as they are. Figures are of one launch with cold caches, so that its time is not the benchmark's.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.prefill_cases import CASES, chosen, peer_of
from benchmarks.variants import parse_variants, variant_chooser

SECTIONS = (
    "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats", "SchedulerStats",
    "LaunchStats",
)  # fmt: skip
TIMEOUT_S = 240
NUM_STALLS = 5
# What is read, by its name here: metrics of which the first that is there counts, and what it is multiplied with.
FIGURES: dict[str, tuple[tuple[str, ...], float]] = {
    "us": (("gpu__time_duration.sum",), 1e-3),
    "issue_pct": (("smsp__issue_active.avg.pct_of_peak_sustained_active", "smsp__issue_active.avg.pct"), 1.0),
    "l2_pct": (("lts__throughput.avg.pct_of_peak_sustained_elapsed",), 1.0),
    "l2_hit_pct": (("lts__t_sector_hit_rate.pct",), 1.0),
    "dram_pct": (
        (
            "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
            "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        ),
        1.0,
    ),
    "l1_pct": (("l1tex__throughput.avg.pct_of_peak_sustained_active",), 1.0),
    "registers": (("launch__registers_per_thread",), 1.0),
    "shared_kib": (("launch__shared_mem_per_block", "launch__shared_mem_per_block_dynamic"), 1 / 1024),
    "grid": (("launch__grid_size",), 1.0),
}
# The busiest of the tensor pipes: their names differ between generations.
TENSOR = re.compile(r"sm__(?:inst_executed_)?pipe_tensor\w*\.avg\.pct_of_peak_sustained_active$")
STALL = re.compile(r"smsp__average_warps_issue_stalled_(?!\w*not_issued)(\w+?)_per_issue_active\.ratio$")


def parse(text: str) -> list[dict[str, Any]]:
    """Each kernel of ``ncu --csv --page raw --print-units base``: name, the figures that are there, stalls by reason.

    A stall is in warps that wait so, on average, at each issue.
    """
    table = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    if len(table) < 3:  # Names, units, and a kernel at least.
        return []
    names, _, *rows = table
    found = []
    for row in rows:
        raw = dict(zip(names, row, strict=False))
        title = raw.get("Kernel Name", "?")
        tensor = [
            value for metric, word in raw.items() if TENSOR.match(metric) and (value := _number(word)) is not None
        ]
        kernel: dict[str, Any] = {
            "kernel": title,
            "program": program_of(title),
            "tensor_pct": max(tensor, default=None),
        }
        for name, (metrics, factor) in FIGURES.items():
            values = (_number(raw.get(metric)) for metric in metrics)
            kernel[name] = next((value * factor for value in values if value is not None), None)
        stalls = {
            match[1]: value
            for metric, word in raw.items()
            if (match := STALL.match(metric)) and (value := _number(word)) is not None
        }
        kernel["stalls"] = dict(sorted(stalls.items(), key=lambda item: -item[1])[:NUM_STALLS])
        found.append(kernel)
    return found


def _number(word: str | None) -> float | None:
    try:
        value = float((word or "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def program_of(kernel: str) -> str:
    """Whose a kernel is, by its name."""
    if "flash" in kernel or "cutlass" in kernel:
        return "fa3"
    return "torch" if "at::" in kernel else "tilelang"


def lines(title: str, kernels: list[dict[str, Any]]) -> list[str]:
    """A row for people: a line a kernel, and one with what it waits for."""
    found = [title]
    for kernel in kernels:
        figures = " ".join(
            f"{name} {kernel[name]:.4g}" for name in ("tensor_pct", *FIGURES) if kernel[name] is not None
        )
        stalls = ", ".join(f"{reason} {value:.2f}" for reason, value in kernel["stalls"].items())
        found += [
            f"  {kernel['program']:9} {kernel['kernel'][:40]:40} {figures}",
            f"  {'':9} stalls: {stalls or 'none told'}",
        ]
    return found


def reason_of(output: str) -> str:
    """Why ncu told nothing."""
    if "ERR_NVGPUCTRPERM" in output:
        return "the driver lets only administrators read the counters (ERR_NVGPUCTRPERM)"
    told = [line for line in output.splitlines() if "ERROR" in line or "Error" in line]
    return "; ".join(told[:3])[:500] or f"no kernel was profiled: {output[-300:]}"


def profile(name: str, page: int, variants: str) -> dict[str, Any]:
    """One row in a process of its own under ncu: its kernels, or an error."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.csv"
        command = [
            "ncu", "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log), "--clock-control", "none",
            "--profile-from-start", "off", "--target-processes", "application-only",
            *(word for section in SECTIONS for word in ("--section", section)),
            sys.executable, "-m", "benchmarks.ncu_prefill", "--child", name, "--pages", str(page),
            "--variants", variants,
        ]  # fmt: skip
        try:
            child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {TIMEOUT_S} s"}
        text = log.read_text() if log.exists() else ""
    kernels = parse(text)
    return {"kernels": kernels} if kernels else {"error": reason_of("\n".join((text, child.stdout, child.stderr)))}


def launch(name: str, page: int, variants: str) -> None:
    """What runs under ncu: each kernel once before, and once while it is watched."""
    import torch

    from tl_backend.device import DeviceSpec
    from tl_backend.measure.answers import Answers
    from tl_backend.measure.workload import Batch

    device = torch.device("cuda")
    workload = next(case for case in CASES if case.name == name).workload(page)
    batch = Batch(workload, device)
    overrides = next(iter(parse_variants(variants).values()), None)
    problem, spec = workload.problem, DeviceSpec.of(device)
    own, _ = batch.tilelang(None if overrides is None else variant_chooser(problem, spec, overrides))
    peers = peer_of(batch, Answers(batch)).peers
    launches = [own, *(peer.launch for peer in peers.values())]
    for once in launches:
        once()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for once in launches:
        once()
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def compile_rows(names: Sequence[str], pages: Sequence[int], variants: str) -> None:
    """Into the kernel cache, so that no compiler runs under ncu."""
    import torch

    from tl_backend.device import DeviceSpec
    from tl_backend.ops.build import build_kernels
    from tl_backend.ops.prepare import required_kernels

    spec = DeviceSpec.of(torch.device("cuda"))
    overrides = next(iter(parse_variants(variants).values()), None)
    keys = []
    for case in CASES:
        for problem in {case.workload(page).problem for page in pages} if case.name in names else ():
            chooser = None if overrides is None else variant_chooser(problem, spec, overrides)
            keys += [k for k in required_kernels(problem, spec, chooser=chooser) if k.kind.startswith("prefill")]
    for key, built in build_kernels(keys).items():
        if isinstance(built, str):
            print(f"{key.problem}: {built}")


def main(argv: Sequence[str] | None = None) -> int:
    """Profile the rows; 1 if one of them told nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="SUBSTRING", help="rows; may be repeated")
    parser.add_argument("--pages", default="128", metavar="16,128", help="page sizes (default: %(default)s)")
    parser.add_argument("--variants", default="", help="one config of ours instead of the chosen one: block_n=160 ...")
    parser.add_argument("--out", type=Path, help="write all to this JSON file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    pages = [int(word) for word in options.pages.split(",")]
    if options.child is not None:
        launch(options.child, pages[0], options.variants)
        return 0
    if shutil.which("ncu") is None:
        parser.error("ncu is not installed")
    names = [case.name for case in chosen(options.only)]
    compile_rows(names, pages, options.variants)
    found = {}
    for name in names:
        for page in pages:
            title = f"{name}, page {page}"
            row = found[title] = profile(name, page, options.variants)
            told = lines(title, row["kernels"]) if "kernels" in row else [f"{title}: {row['error']}"]
            print("\n".join(told), flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps({"variants": options.variants, "rows": found}, indent=1) + "\n")
    return 1 if any("error" in row for row in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
