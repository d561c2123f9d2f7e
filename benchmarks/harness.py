"""Timing, ceilings and result files that the benchmarks share.

A row's answer is checked before it is timed. Candidate and peer alternate in one process on the same tensors; what is
quoted is the median of paired ratios with its 95% interval: a card's clock moves more between runs than in a pair.
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Launch = Callable[[], object]

ROUNDS = 31
WARMUP = 5


def time_ms(launches: dict[str, Launch], *, rounds: int = ROUNDS, cold: bool = False) -> dict[str, list[float]]:
    """Milliseconds of each launch in each round, the launches taking turns; ``cold`` empties the L2 before each."""
    evict = torch.empty(256 << 20, dtype=torch.uint8, device="cuda") if cold else None  # Four times an H200's L2.
    for launch in list(launches.values()) * WARMUP:
        launch()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in launches}
    for _ in range(rounds):
        for name, launch in launches.items():
            if evict is not None:
                evict.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            launch()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def as_graph(launch: Launch) -> Launch:
    """The launch as a CUDA-graph replay: short kernels are timed without the host's share."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


def ratio(candidate: list[float], peer: list[float]) -> dict[str, float]:
    """How many times faster the candidate is: median of paired ratios, with a 95% interval of that median."""
    ratios = sorted(p / c for c, p in zip(candidate, peer, strict=True))
    # The interval between order statistics of a binomial(n, 1/2): n/2 -+ 1.96 * sqrt(n) / 2.
    half = 1.96 * len(ratios) ** 0.5 / 2
    low, high = max(0, int(len(ratios) / 2 - half)), min(len(ratios) - 1, int(len(ratios) / 2 + half))
    return {"median": statistics.median(ratios), "low": ratios[low], "high": ratios[high]}


def ceilings() -> dict[str, float]:
    """What this card reaches now: bf16 matmul (8192 cubed, random data) and device copy (bytes read plus written)."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = statistics.median(time_ms({"matmul": lambda: a @ b})["matmul"])
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = statistics.median(time_ms({"copy": lambda: target.copy_(source)})["copy"])
    return {"matmul_tflops": 2 * 8192**3 / matmul / 1e9, "copy_tbps": 2 * source.numel() / copy / 1e9}


def environment() -> dict[str, str]:
    """GPU, driver, versions and date."""
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[0]
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "tilelang": importlib.metadata.version("tilelang"),
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
    }


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    """``|got - want| / |want|``; NaN if either has one."""
    return float((got.double() - want).norm() / want.norm())


def write_results(path: Path, rows: list[dict[str, Any]], ceiling: dict[str, float]) -> None:
    """The rows with the environment that they were measured in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), "ceilings": ceiling, "rows": rows}, indent=1) + "\n")
