"""Paged prefill and extend on this GPU, beside the peers that are there.

Run ``python -m benchmarks.prefill --out benchmarks/results/prefill_h200.json``.
"""

from __future__ import annotations

from benchmarks.program import run
from tl_backend.measure.workload import Workload, problem

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


if __name__ == "__main__":
    assert __doc__
    run(__doc__, workloads(), ("prefill",), lambda kernel: f"{kernel.tflops:6.0f} TFLOP/s")
