"""The tensors that a search runs on: one cache that the batches of all cases share, or that is poisoned."""

from __future__ import annotations

import math

import torch

from tl_backend.measure.workload import Batch, Workload
from tl_backend.problem import AttentionProblem

# What stands for NaN in 8-bit floats.
_NAN_BITS = {"float8_e4m3fn": 0x7F, "float8_e4m3fnuz": 0x80, "float8_e5m2": 0x7F}
_NOWHERE = 2**31 - 1  # A block that must not be looked up.
_PIECE = 1 << 28  # Elements made at once: an 8-bit cache is converted.


def num_pages(workload: Workload) -> int:
    """Blocks that the keys of a workload fill; 0 where they lie in no cache."""
    page_size = workload.problem.page_size
    return 0 if page_size is None else sum(-(-length // page_size) for length in workload.seq_lens)


def random_cache(problem: AttentionProblem, num_blocks: int, device: torch.device) -> torch.Tensor:
    """``[N, HK, page, 2 * D]`` of normal data, stored NHD: zeros would need less power, and run at another clock."""
    shape = (num_blocks, problem.page_size or 0, problem.num_kv_heads, 2 * problem.head_dim)
    store = torch.empty(shape, dtype=getattr(torch, problem.kv_dtype), device=device)
    for blocks in store.split(max(1, _PIECE // max(1, math.prod(shape[1:])))):
        blocks.copy_(torch.randn(blocks.shape, dtype=getattr(torch, problem.dtype), device=device))
    return store.permute(0, 2, 1, 3)


class CacheBatch(Batch):
    """A batch in some blocks of a given cache, in random order; table entries past a request's end lead nowhere.

    Args:
        cache: as ``random_cache`` makes it, with as many blocks as the workload fills, or more.
    """

    def __init__(self, workload: Workload, cache: torch.Tensor) -> None:
        self._cache = cache
        super().__init__(workload, cache.device)

    def _make_cache(self) -> None:
        page_size = self._cache.shape[2]
        pages = [-(-length // page_size) for length in self.workload.seq_lens]
        table = torch.full((len(pages), max(pages) + 1), _NOWHERE, dtype=torch.int32)
        order = torch.randperm(self._cache.shape[0])[: sum(pages)].int()
        for row, ids in enumerate(order.split(pages)):
            table[row, : len(ids)] = ids
        self.kv_cache, self.block_table = self._cache, table.to(self.device)

    def poison(self) -> None:
        """Make every slot NaN that no query attends to: unwritten ones, and those that the window has left behind."""
        if self.block_table is None:
            return
        problem, cache, table = self.workload.problem, self._cache, self.block_table.cpu()
        page_size = cache.shape[2]
        seen = torch.zeros(cache.shape[0], page_size, dtype=torch.bool)
        for row, (query_len, seq_len) in enumerate(zip(self.workload.query_lens, self.workload.seq_lens, strict=True)):
            window = seq_len if problem.window is None else problem.window
            positions = torch.arange(max(0, seq_len - query_len - window + 1), seq_len)
            seen[table[row][positions // page_size].long(), positions % page_size] = True
        blocks, slots = (~seen).to(cache.device).nonzero(as_tuple=True)
        if problem.is_quantized:
            cache.view(torch.uint8)[blocks, :, slots] = _NAN_BITS[problem.kv_dtype]
        else:
            cache[blocks, :, slots] = math.nan
