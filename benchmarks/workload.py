"""Batches for the attention benchmarks, and vLLM's FlashAttention-3 as the peer."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Launch, ceilings, write_results
from tl_backend.device import DeviceSpec
from tl_backend.ops import AttentionWorkspace, paged_attention, plan_attention
from tl_backend.ops.compiled import KINDS
from tl_backend.ops.prepare import fill_disk_cache, required_kernels
from tl_backend.ops.reference import paged_attention_reference
from tl_backend.problem import AttentionProblem


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One row: a problem and the lengths of its requests."""

    name: str
    problem: AttentionProblem
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @property
    def flops(self) -> float:
        """4 * H * D for each pair of a query and a key that it attends to, causal pairs counted once."""
        pairs = sum(n * s - n * (n - 1) / 2 for n, s in zip(self.query_lens, self.seq_lens, strict=True))
        return 4 * self.problem.num_q_heads * self.problem.head_dim * pairs

    @property
    def kv_bytes(self) -> int:
        """Keys and values, each read once."""
        return sum(self.seq_lens) * self.problem.num_kv_heads * 2 * self.problem.head_dim * 2


def problem(num_q_heads: int, num_kv_heads: int, head_dim: int, page_size: int) -> AttentionProblem:
    """A causal bf16 problem."""
    return AttentionProblem(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype="bfloat16",
        kv_dtype="bfloat16",
        out_dtype="bfloat16",
        page_size=page_size,
    )


def compile_all(problems: Iterable[AttentionProblem], kinds: tuple[str, ...] = KINDS) -> None:
    """Compile the kernels of these kinds for all problems side by side, into the disk cache.

    Raises:
        SystemExit: one does not compile.
    """
    spec = DeviceSpec.of(torch.device("cuda"))
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
        write_results(out, rows, ceiling)


class Batch:
    """The tensors of a workload: random data, pages in random order, queries as a view of a fused qkv buffer."""

    def __init__(self, workload: Workload) -> None:
        self.workload, p = workload, workload.problem
        pages = [-(-s // p.page_size) for s in workload.seq_lens]
        # NHD, seen as the logical [num_blocks, HK, block_size, 2 * D].
        shape = (sum(pages), p.page_size, p.num_kv_heads, 2 * p.head_dim)
        self.store = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.kv_cache = self.store.permute(0, 2, 1, 3)
        order = torch.randperm(sum(pages), device="cuda").int()
        self.block_table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device="cuda")
        for row, ids in enumerate(order.split(pages)):
            self.block_table[row, : len(ids)] = ids
        starts = torch.tensor([0, *workload.query_lens]).cumsum(0).int()
        self.starts_cpu, self.starts = starts, starts.cuda()
        self.seq_lens = torch.tensor(workload.seq_lens, dtype=torch.int32, device="cuda")
        rows, width = sum(workload.query_lens), p.num_q_heads * p.head_dim
        fused = torch.randn(rows, width + 2 * p.num_kv_heads * p.head_dim, device="cuda", dtype=torch.bfloat16)
        self.q = fused[:, :width].view(rows, p.num_q_heads, p.head_dim)
        self.max_q, self.max_k = max(workload.query_lens), max(workload.seq_lens)

    def reference(self) -> torch.Tensor:
        """Float64; only for workloads whose dense logits fit into memory."""
        return paged_attention_reference(self.q, self.kv_cache, self.block_table, self.starts, self.seq_lens)

    def tilelang(self) -> tuple[Launch, torch.Tensor]:
        """This package's kernels with a plan made once, and the output they write."""
        out = torch.full(self.q.shape, torch.nan, device="cuda", dtype=torch.bfloat16)
        workspace = AttentionWorkspace(
            self.workload.problem,
            self.q.device,
            max_num_reqs=len(self.workload.seq_lens),
            max_num_tokens=self.q.shape[0],
        )
        plan = plan_attention(
            self.workload.problem,
            self.starts,
            self.seq_lens,
            cu_seqlens_q_cpu=self.starts_cpu,
            max_seqlen_q=self.max_q,
            max_seqlen_k=self.max_k,
            workspace=workspace,
        )

        def launch() -> None:
            paged_attention(
                self.q,
                self.kv_cache,
                self.block_table,
                self.starts,
                self.seq_lens,
                max_seqlen_q=self.max_q,
                max_seqlen_k=self.max_k,
                out=out,
                plan=plan,
            )

        return launch, out

    def flash_attention_3(self) -> tuple[Launch, torch.Tensor] | None:
        """FA3 as vLLM builds it, without scheduler metadata, and its output; None unless FA3_LIBRARY names it."""
        library = os.environ.get("FA3_LIBRARY")
        if not library:
            return None
        torch.ops.load_library(library)
        head_dim = self.workload.problem.head_dim
        out = torch.full(self.q.shape, torch.nan, device="cuda", dtype=torch.bfloat16)
        keys, values = self.store.split(head_dim, dim=-1)
        # Positions as in vllm/vllm_flash_attn/flash_attn_interface.py of vLLM 0.33.
        before = (self.q, keys, values, None, None, None, out, self.starts, None, None, None, self.seq_lens)
        lens = (self.max_q, self.max_k, self.block_table)
        after = (head_dim**-0.5, True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None)

        def launch() -> None:
            torch.ops._vllm_fa3_C.fwd(*before, *lens, *[None] * 8, *after)

        return launch, out
