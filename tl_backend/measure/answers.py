"""Whether an answer is right, before anybody times it."""

from __future__ import annotations

import torch

from tl_backend.measure.workload import Batch
from tl_backend.ops.reference import paged_attention_reference, varlen_attention_reference

# Worst relative RMS of a row against float64. 16-bit: weights and output are rounded, to 2^-9 and 2^-12 at most of
# themselves, which is 1.2e-3 in bf16; and a row of 16k keys that misses one of them is off by 8e-3.
TOLERANCE = {"bfloat16": 4e-3, "float16": 2e-3, "float32": 1e-4}
SAMPLE_ROWS = 64
# Rows before a request's end that are sampled where a row's answer is made together with all that follow it.
LAST_ROWS = 64
# Pairs of a query and a key up to which a whole reference is made: 256 MiB of float64 logits for 32 heads.
WHOLE_REFERENCE_PAIRS = 1 << 20


class Answers:
    """The float64 answer of a batch, in a sample of its rows where the whole would not fit into memory."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        workload = batch.workload
        pairs = sum(n * s for n, s in zip(workload.query_lens, workload.seq_lens, strict=True))
        if pairs <= WHOLE_REFERENCE_PAIRS:
            self.rows, self.want = torch.arange(len(batch.q), device=batch.device), batch.reference()
        else:
            self.rows = _sample(batch).to(batch.device)
            self.want = torch.cat([_row(batch, row) for row in self.rows.tolist()])

    def error(self, out: torch.Tensor) -> float:
        """The worst ``|got - want| / |want|`` of a row ``[H, D]``; NaN if any row, sampled or not, has a NaN."""
        if not bool(torch.isfinite(out).all()):
            return float("nan")
        return float(((out[self.rows].double() - self.want).norm(dim=(1, 2)) / self.want.norm(dim=(1, 2))).max())

    def problem_of(self, out: torch.Tensor) -> str | None:
        """What is wrong with an output, or None."""
        error, limit = self.error(out), TOLERANCE[self.batch.workload.problem.dtype]
        return None if error <= limit else f"its answer is off by {error:.1e} of a row; {limit:.0e} is the limit"


def _sample(batch: Batch) -> torch.Tensor:
    """Rows: the first and last of the batch, those around multiples of tiles, and random ones."""
    num_rows = len(batch.q)
    if _counts_positions(batch):
        ends = batch.starts_cpu[1:].tolist()
        last = [
            row
            for end, start in zip(ends, batch.starts_cpu.tolist(), strict=False)
            for row in range(max(start, end - LAST_ROWS), end)
        ]
        return torch.tensor(last[:: -(-len(last) // SAMPLE_ROWS)])
    edges = [row for row in (0, 1, 63, 64, 127, 128, 191, 192, num_rows - 2, num_rows - 1) if 0 <= row < num_rows]
    generator = torch.Generator().manual_seed(0)
    others = torch.randint(num_rows, (SAMPLE_ROWS - len(edges),), generator=generator).tolist()
    return torch.tensor(sorted({*edges, *others}))


def _counts_positions(batch: Batch) -> bool:
    """Whether a row can not stand for itself: keys behind it are seen, and how far they are matters."""
    p = batch.workload.problem
    return not p.causal and (p.window is not None or p.has_alibi)


def _row(batch: Batch, row: int) -> torch.Tensor:
    """The answer ``[1, H, D]`` of one query row.

    A causal row sees no key behind itself: its request can end there. Another sees all keys from wherever it is, unless
    positions count: then it is made with its followers as queries.
    """
    workload = batch.workload
    request = int((batch.starts_cpu[1:] <= row).sum())
    end = int(batch.starts_cpu[request + 1])
    seq_len = workload.seq_lens[request]
    if workload.problem.causal:
        seq_len -= end - row - 1
    if workload.problem.causal or not _counts_positions(batch):
        end = row + 1
    q, starts = batch.q[row:end], torch.tensor([0, end - row])
    if batch.kv_cache is None or batch.block_table is None:
        k, v = batch.keys_and_values(request)
        ends = torch.tensor([0, seq_len])
        return varlen_attention_reference(q, k[:seq_len], v[:seq_len], starts, ends, **batch.options())[:1]
    table = batch.block_table[request : request + 1]
    lens = torch.tensor([seq_len])
    return paged_attention_reference(q, batch.kv_cache, table, starts, lens, **batch.options())[:1]
