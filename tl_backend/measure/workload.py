"""Workloads, and their tensors on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tl_backend.configs.choice import Chooser
from tl_backend.measure.timing import Launch
from tl_backend.ops import AttentionWorkspace, paged_attention, plan_attention
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


class Batch:
    """The tensors of a workload: random data, pages in random order, queries as a view of a fused qkv buffer."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.workload, self.device, p = workload, device, workload.problem
        dtype = getattr(torch, p.dtype)
        assert p.page_size is not None, "a workload's keys lie in a cache"
        pages = [-(-s // p.page_size) for s in workload.seq_lens]
        # NHD, seen as the logical [num_blocks, HK, block_size, 2 * D].
        shape = (sum(pages), p.page_size, p.num_kv_heads, 2 * p.head_dim)
        self.store = torch.randn(shape, device=device, dtype=dtype)
        self.kv_cache = self.store.permute(0, 2, 1, 3)
        order = torch.randperm(sum(pages), device=device).int()
        self.block_table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device=device)
        for row, ids in enumerate(order.split(pages)):
            self.block_table[row, : len(ids)] = ids
        starts = torch.tensor([0, *workload.query_lens]).cumsum(0).int()
        self.starts_cpu, self.starts = starts, starts.to(device)
        self.seq_lens = torch.tensor(workload.seq_lens, dtype=torch.int32, device=device)
        rows, width = sum(workload.query_lens), p.num_q_heads * p.head_dim
        fused = torch.randn(rows, width + 2 * p.num_kv_heads * p.head_dim, device=device, dtype=dtype)
        self.q = fused[:, :width].view(rows, p.num_q_heads, p.head_dim)
        self.max_q, self.max_k = max(workload.query_lens), max(workload.seq_lens)

    def reference(self) -> torch.Tensor:
        """Float64; only for workloads whose dense logits fit into memory."""
        return paged_attention_reference(self.q, self.kv_cache, self.block_table, self.starts, self.seq_lens)

    def tilelang(self, chooser: Chooser | None = None) -> tuple[Launch, torch.Tensor]:
        """This package's kernels with a plan made once, and the output they write.

        Args:
            chooser: of their configs. Default: this device's tables.
        """
        out = torch.full_like(self.q, torch.nan, memory_format=torch.contiguous_format)
        workspace = AttentionWorkspace(
            self.workload.problem,
            self.q.device,
            max_num_reqs=len(self.workload.seq_lens),
            max_num_tokens=self.q.shape[0],
            chooser=chooser,
        )
        plan = plan_attention(
            self.workload.problem,
            self.starts,
            self.seq_lens,
            cu_seqlens_q_cpu=self.starts_cpu,
            max_seqlen_q=self.max_q,
            max_seqlen_k=self.max_k,
            workspace=workspace,
            seq_lens_cpu_upper_bound=torch.tensor(self.workload.seq_lens),
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
