"""Paged prefill and extend on this GPU, beside FlashAttention-3 where its library is at hand.

Run ``python -m benchmarks.prefill --out benchmarks/results/prefill_h200.json``.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.program import DEVICE, run
from tl_backend.measure.peers import flash_attention_3
from tl_backend.measure.timing import ratio, relative_rms, time_ms
from tl_backend.measure.workload import Batch, Workload, problem

TOLERANCE = 4e-3  # relative RMS of bf16 attention against float64
VARLEN = (100, 2000, 513, 3000, 77, 1500)


def workloads() -> list[Workload]:
    """Prefill, extend and varlen at pages that are gathered and pages that TMA copies whole."""
    found = []
    for page_size in (16, 64, 128):
        llama = problem(32, 8, 128, page_size)
        found += [
            Workload(name="prefill 8192", problem=llama, query_lens=(8192,), seq_lens=(8192,)),
            Workload(name="2048 new at 32768", problem=llama, query_lens=(2048,), seq_lens=(32768,)),
            Workload(name="varlen 77-3000", problem=llama, query_lens=VARLEN, seq_lens=VARLEN),
            Workload(name="32 x 64 new at 1024", problem=llama, query_lens=(64,) * 32, seq_lens=(1024,) * 32),
        ]
        qwen, small, large = (problem(*s, page_size) for s in ((28, 4, 128), (32, 8, 64), (16, 8, 256)))
        found += [
            Workload(name="28/4 prefill 4096", problem=qwen, query_lens=(4096,), seq_lens=(4096,)),
            Workload(name="D 64 prefill 8192", problem=small, query_lens=(8192,), seq_lens=(8192,)),
            Workload(name="D 256 prefill 8192", problem=large, query_lens=(8192,), seq_lens=(8192,)),
        ]
    return found


def check(workload: Workload) -> float:
    """The error of a short workload of the same problem, whose reference fits into memory.

    Raises:
        SystemExit: the answer is wrong: a time would mean nothing.
    """
    sample = Workload(name="sample", problem=workload.problem, query_lens=(300, 1, 777), seq_lens=(300, 999, 1500))
    batch = Batch(sample, DEVICE)
    launch, out = batch.tilelang()
    launch()
    error = relative_rms(out, batch.reference())
    if not error <= TOLERANCE:
        raise SystemExit(f"{workload.name}, page {workload.problem.page_size}: error {error:.2e} > {TOLERANCE:.0e}")
    return error


def measure(workload: Workload) -> dict[str, Any]:
    """One row."""
    error = check(workload)
    batch = Batch(workload, DEVICE)
    launches = {"tilelang": batch.tilelang()[0]}
    if (peer := flash_attention_3(batch)) is not None:
        launches["fa3"] = peer[0]
    times = time_ms(launches, DEVICE)
    row: dict[str, Any] = {
        "name": workload.name,
        "page_size": workload.problem.page_size,
        "num_q_heads": workload.problem.num_q_heads,
        "num_kv_heads": workload.problem.num_kv_heads,
        "head_dim": workload.problem.head_dim,
        "relative_rms": error,
    }
    for name, values in times.items():
        row[f"{name}_ms"] = statistics.median(values)
        row[f"{name}_tflops"] = workload.flops / row[f"{name}_ms"] / 1e9
    if peer is not None:
        row["times_fa3"] = ratio(times["tilelang"], times["fa3"])
    return row


def show(row: dict[str, Any], ceiling: dict[str, float]) -> str:
    """A row as a line of the table."""
    share = row["tilelang_tflops"] / ceiling["matmul_tflops"]
    return (
        f"{row['name']:22} page {row['page_size']:<4} {row['tilelang_ms'] * 1e3:9.0f} us  "
        f"{row['tilelang_tflops']:6.0f} TFLOP/s  {share:5.0%} of matmul"
    )


if __name__ == "__main__":
    assert __doc__
    run(__doc__, workloads(), ("prefill",), measure, show)
