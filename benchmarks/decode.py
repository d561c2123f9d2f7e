"""Paged decode on this GPU, beside FlashAttention-3 where its library is at hand. CUDA-graph replay, cold L2.

Run ``python -m benchmarks.decode --out benchmarks/results/decode_h200.json``.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.program import DEVICE, run
from tl_backend.measure.peers import flash_attention_3
from tl_backend.measure.timing import as_graph, ratio, relative_rms, time_ms
from tl_backend.measure.workload import Batch, Workload, problem

TOLERANCE = 4e-3  # relative RMS of bf16 attention against float64


def workloads() -> list[Workload]:
    """Small batches, which are split, and large ones, which read the cache at the rate of memory."""
    return [
        Workload(
            name=f"batch {batch} x {context}",
            problem=problem(32, 8, 128, page_size),
            query_lens=(1,) * batch,
            seq_lens=(context,) * batch,
        )
        for page_size in (16, 128)
        for batch, context in ((1, 512), (1, 8192), (8, 2048), (8, 8192), (64, 2048), (64, 8192))
    ]


def measure(workload: Workload) -> dict[str, Any]:
    """One row.

    Raises:
        SystemExit: the answer is wrong: a time would mean nothing.
    """
    batch = Batch(workload, DEVICE)
    launch, out = batch.tilelang()
    launch()
    error = relative_rms(out, batch.reference())
    if not error <= TOLERANCE:
        raise SystemExit(f"{workload.name}, page {workload.problem.page_size}: error {error:.2e} > {TOLERANCE:.0e}")
    launches = {"tilelang": as_graph(launch, DEVICE)}
    if (peer := flash_attention_3(batch)) is not None:
        launches["fa3"] = as_graph(peer[0], DEVICE)
    times = time_ms(launches, DEVICE, cold=True)
    row: dict[str, Any] = {"name": workload.name, "page_size": workload.problem.page_size, "relative_rms": error}
    for name, values in times.items():
        row[f"{name}_us"] = statistics.median(values) * 1e3
        row[f"{name}_tbps"] = workload.kv_bytes / row[f"{name}_us"] / 1e6
    if peer is not None:
        row["times_fa3"] = ratio(times["tilelang"], times["fa3"])
    return row


def show(row: dict[str, Any], ceiling: dict[str, float]) -> str:
    """A row as a line of the table."""
    share = row["tilelang_tbps"] / ceiling["copy_tbps"]
    return (
        f"{row['name']:18} page {row['page_size']:<4} {row['tilelang_us']:8.1f} us  "
        f"{row['tilelang_tbps']:5.2f} TB/s  {share:5.0%} of copy"
    )


if __name__ == "__main__":
    assert __doc__
    run(__doc__, workloads(), ("decode", "decode_combine"), measure, show)
