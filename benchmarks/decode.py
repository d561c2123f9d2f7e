"""Paged decode on this GPU, beside the peers that are there. CUDA-graph replay, cold L2.

Run ``python -m benchmarks.decode --out benchmarks/results/decode_h200.json``.
"""

from __future__ import annotations

from benchmarks.program import run
from tl_backend.measure.workload import Workload, problem


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


if __name__ == "__main__":
    assert __doc__
    run(__doc__, workloads(), ("decode", "decode_combine"), lambda kernel: f"{kernel.tbps:5.2f} TB/s", cold=True)
