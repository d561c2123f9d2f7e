"""What ordinary sizes cannot show: offsets beyond 2**31 elements, long contexts, streams, graphs, hidden syncs.

``limit`` is the number of elements that offsets must exceed: 2**31 on a GPU, something small in a dry run on a CPU,
which runs the same code. Every check raises an AssertionError.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tests.gpu.long_contexts import INT32_LIMIT, Extreme, context_extremes, long_context
from tests.gpu.properties import property_extremes
from tl_backend.configs.choice import FixedChooser
from tl_backend.configs.decode import default_decode_tile
from tl_backend.device import DeviceSpec
from tl_backend.errors import InvalidInputError
from tl_backend.ops import AttentionWorkspace, paged_attention, paged_cache_write, plan_attention
from tl_backend.ops.cache_write import cache_write_key, cache_write_problem
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.decode import decode_keys
from tl_backend.ops.merge import merge_key
from tl_backend.ops.prepare import required_kernels
from tl_backend.ops.reference import paged_attention_reference
from tl_backend.problem import AttentionProblem
from tl_backend.testing.cases import Case, make_batch, make_problem
from tl_backend.testing.poison import check_attention
from tl_backend.testing.poison_judge import TOLERANCES, num_different, relative_rms
from tl_backend.testing.poison_run import forced_splits


def extremes(dtype: str) -> list[Extreme]:
    """All checks, for one dtype."""
    small_pages = make_problem(32, 8, 128, 16, dtype=dtype)
    large_pages = make_problem(32, 8, 128, 128, dtype=dtype)
    wide = make_problem(64, 4, 128, 16, dtype=dtype)
    both = ("prefill", "decode", "cache_write")
    found = [
        Extreme(
            name=f"A2 block ids beyond the limit, page {problem.page_size}", problem=problem, kinds=both, check=check
        )
        for problem, check in ((small_pages, high_block_ids), (large_pages, high_block_ids))
    ]
    found += [
        Extreme(name="A5 block stride of half the limit", problem=small_pages, kinds=both, check=large_block_stride),
        Extreme(name="A1 A3 query and output rows beyond the limit", problem=wide, kinds=("prefill",), check=many_rows),
        Extreme(name="A1 A3 decodes beyond the limit", problem=wide, kinds=("decode",), check=many_decodes),
        *(
            Extreme(name=f"A4 {n} keys", problem=small_pages, kinds=("prefill", "decode_split"), check=long_context(n))
            for n in (65535, 65536, 65537, 131073)
        ),
        *(
            Extreme(
                name=f"A10 zero-length queries, {'causal' if causal else 'full'}",
                problem=make_problem(4, 1, 256, 16, dtype=dtype, causal=causal),
                kinds=("prefill",),
                check=zero_length_queries,
            )
            for causal in (True, False)
        ),
    ]
    found += context_extremes(dtype) + property_extremes(dtype)
    on_gpus = [("P7 another stream", another_stream), ("P7 a captured graph", captured)]
    if torch.cuda.device_count() > 1:
        on_gpus.append(("P7 another device is refused", another_device))
    found += [
        Extreme(name=name, problem=small_pages, kinds=("prefill", "decode_split"), check=check, gpu_only=True)
        for name, check in (*on_gpus, ("a plan neither syncs nor allocates", no_sync_no_allocation))
    ]
    return found


def kernel_keys(problem: AttentionProblem, kinds: tuple[str, ...], device: DeviceSpec) -> list[KernelKey]:
    """Keys of "prefill" (the default family's), "decode", "decode_split" (with its combine), "cache_write", "merge"."""
    made: dict[str, Callable[[], list[KernelKey]]] = {
        "prefill": lambda: [
            key
            for key in required_kernels(problem, device, chooser=FixedChooser(problem, device))
            if key.kind.startswith("prefill")  # A family may have a combine of its own.
        ],
        "decode": lambda: decode_keys(problem, default_decode_tile(problem, device), device, split=False),
        "decode_split": lambda: decode_keys(problem, default_decode_tile(problem, device), device, split=True),
        "cache_write": lambda: [cache_write_key(cache_write_problem(problem), device)],
        "merge": lambda: [merge_key(problem, device)],
    }
    return [key for kind in kinds for key in made[kind]()]


def _dtype(problem: AttentionProblem) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, problem.dtype)
    return dtype


def _int32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _twins(kv_cache: torch.Tensor, low: list[int], high: list[int], problem: AttentionProblem) -> float:
    """The same sequence in blocks ``low`` and ``high``, written and attended: the outputs must have the same bits."""
    device, page = kv_cache.device, problem.page_size
    seq_len = len(low) * page - 3
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(_dtype(problem))

    key, value = (randn(seq_len, problem.num_kv_heads, problem.head_dim) for _ in range(2))
    position = torch.arange(seq_len, device=device)
    for blocks in (low, high):
        slots = torch.tensor(blocks, device=device)[position // page] * page + position % page
        paged_cache_write(key, value, kv_cache, slots)
    worst = 0.0
    for query_len in (1, 5):
        q = randn(query_len, problem.num_q_heads, problem.head_dim).repeat(2, 1, 1)
        arguments = (q, kv_cache, _int32([low, high], device), _int32([0, query_len, 2 * query_len], device))
        with forced_splits(1):
            out = paged_attention(
                *arguments, _int32([seq_len] * 2, device), max_seqlen_q=query_len, max_seqlen_k=seq_len
            )
        wanted = paged_attention_reference(*arguments, _int32([seq_len] * 2, device))
        changed = num_different(out[:query_len], out[query_len:])
        assert changed == 0, (
            f"{changed} elements differ between blocks {low} and {high}, {query_len} queries; the limit is 0"
        )
        worst = max(worst, relative_rms(out, wanted))
    return worst


def high_block_ids(problem: AttentionProblem, device: torch.device, limit: int) -> float:
    """CASES.md A2: a pool just over the limit, a sequence at its highest block ids, its twin at the lowest."""
    shape = (problem.num_kv_heads, problem.page_size, 2 * problem.head_dim)
    num_blocks = limit // math.prod(shape) + 8
    worst = 0.0
    for layout in ("HND", "NHD"):
        heads_inside = (shape[1], shape[0], shape[2]) if layout == "NHD" else shape
        pool = torch.full((num_blocks, *heads_inside), math.nan, dtype=_dtype(problem), device=device)
        kv_cache = pool.transpose(1, 2) if layout == "NHD" else pool
        worst = max(worst, _twins(kv_cache, [2, 0, 1], [num_blocks - 1, num_blocks - 3, num_blocks - 2], problem))
        del pool, kv_cache
    return worst


def large_block_stride(problem: AttentionProblem, device: torch.device, limit: int) -> float:
    """CASES.md A5: blocks half the limit apart, as in a tensor that holds many layers a block."""
    shape = (problem.num_kv_heads, problem.page_size, 2 * problem.head_dim)
    stride = limit // 2 + 4096
    buffer = torch.full((2 * stride + math.prod(shape),), math.nan, dtype=_dtype(problem), device=device)
    kv_cache = buffer.as_strided((3, *shape), (stride, shape[1] * shape[2], shape[2], 1))
    return _twins(kv_cache, [0], [2], problem)


def _equal_first_and_last(
    problem: AttentionProblem, device: torch.device, num_reqs: int, query_len: int, limit: int
) -> float:
    """Many requests over one sequence, in a fused qkv buffer; the first and the last have the same queries."""
    width = (problem.num_q_heads + 2 * problem.num_kv_heads) * problem.head_dim
    rows, heads = num_reqs * query_len, problem.num_q_heads
    assert (rows - 1) * heads * problem.head_dim > limit, "the output does not reach the limit"
    qkv = torch.empty(rows, width, dtype=_dtype(problem), device=device).fill_(0.5)
    q = qkv[:, : heads * problem.head_dim].unflatten(-1, (heads, problem.head_dim))
    generator = torch.Generator(device).manual_seed(1)
    q[:query_len] = torch.randn(q[:query_len].shape, generator=generator, device=device).to(q.dtype)
    q[-query_len:] = q[:query_len]
    seq_len = query_len + 37
    num_blocks = -(-seq_len // problem.page_size)
    kv_cache = torch.randn(
        num_blocks, problem.num_kv_heads, problem.page_size, 2 * problem.head_dim, generator=generator, device=device
    ).to(q.dtype)
    block_table = torch.arange(num_blocks, dtype=torch.int32, device=device).repeat(num_reqs, 1)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * query_len
    seq_lens = torch.full((num_reqs,), seq_len, dtype=torch.int32, device=device)
    out = torch.full(q.shape, math.nan, dtype=q.dtype, device=device)
    paged_attention(
        q, kv_cache, block_table, starts, seq_lens, max_seqlen_q=query_len, max_seqlen_k=seq_len, out=out, num_splits=1
    )
    changed = num_different(out[:query_len], out[-query_len:])
    assert changed == 0, f"{changed} elements differ between the first and the last request; the limit is 0"
    for part in out.split(max(1, rows // 64)):
        assert part.isfinite().all(), "a row was not written"
    wanted = paged_attention_reference(q[:query_len], kv_cache, block_table[:1], starts[:2], seq_lens[:1])
    return relative_rms(out[-query_len:], wanted)


def many_rows(problem: AttentionProblem, device: torch.device, limit: int) -> float:
    """CASES.md A1, A3: prefill of so many tokens that offsets into the queries and the output pass the limit."""
    query_len = 500 if limit == INT32_LIMIT else 5
    num_reqs = limit // (problem.num_q_heads * problem.head_dim * query_len) + 2
    return _equal_first_and_last(problem, device, num_reqs, query_len, limit)


def many_decodes(problem: AttentionProblem, device: torch.device, limit: int) -> float:
    """The same with a request a row."""
    return _equal_first_and_last(problem, device, limit // (problem.num_q_heads * problem.head_dim) + 2, 1, limit)


def zero_length_queries(problem: AttentionProblem, device: torch.device, limit: int) -> float:
    """CASES.md A10."""
    query_lens, seq_lens = (0, 1208, 840, 0), (2538, 1742, 840, 3072)
    if limit < INT32_LIMIT:
        query_lens, seq_lens = (0, 12, 8, 0), (25, 17, 8, 30)
    return check_attention(problem, Case(query_lens=query_lens, seq_lens=seq_lens), device).error


class _Planned:
    """A batch of decodes and prefills, with its plan, output and reference.

    The plan knows the keys of each request: few tokens at 3000 of them are split.
    """

    def __init__(self, problem: AttentionProblem, device: torch.device) -> None:
        self.problem = problem
        self.case = Case(query_lens=(1, 1, 40, 3), seq_lens=(900, 17, 3000, 3), num_splits=4)
        self.batch = make_batch(problem, self.case, device)
        self.batch.poison(math.nan, -1)
        with forced_splits(4):
            self.workspace = AttentionWorkspace(problem, device, max_num_reqs=4, max_num_tokens=45)
        self.starts, self.bounds = self.batch.cu_seqlens_q.cpu(), self.batch.seq_lens.cpu()
        self.out = torch.full(self.batch.q.shape, math.nan, dtype=self.batch.q.dtype, device=device)
        self.make_plan()
        self.wanted = paged_attention_reference(
            self.batch.q, self.batch.kv_cache, self.batch.block_table, self.batch.cu_seqlens_q, self.batch.seq_lens
        )

    def make_plan(self) -> None:
        batch = self.batch
        with forced_splits(4):
            self.plan = plan_attention(
                self.problem,
                batch.cu_seqlens_q,
                batch.seq_lens,
                cu_seqlens_q_cpu=self.starts,
                max_seqlen_q=40,
                max_seqlen_k=3000,
                workspace=self.workspace,
                seq_lens_cpu_upper_bound=self.bounds,
            )

    def run(self) -> None:
        batch = self.batch
        rest = (batch.block_table, batch.cu_seqlens_q, batch.seq_lens)
        paged_attention(
            batch.q, batch.kv_cache, *rest, max_seqlen_q=40, max_seqlen_k=3000, out=self.out, plan=self.plan
        )

    def error(self) -> float:
        error = relative_rms(self.out, self.wanted)
        assert error <= TOLERANCES[self.problem.dtype], f"relative RMS {error:.2e}"
        return error


def another_stream(problem: AttentionProblem, device: torch.device, limit: int) -> float:
    """The stream is busy before it gives the queries their values: a launch on another stream would see NaN."""
    planned = _Planned(problem, device)
    planned.run()
    q = planned.batch.q.clone()
    planned.batch.q.fill_(math.nan)
    planned.out.fill_(math.nan)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # About 0.1 s.
        planned.batch.q.copy_(q)
        planned.run()
    torch.cuda.synchronize(device)
    return planned.error()


def another_device(problem: AttentionProblem, device: torch.device, limit: int) -> float:
    """Tensors on the last GPU are refused by name while the first is the current one: kernels launch on that."""
    batch = make_batch(
        problem, Case(query_lens=(1,), seq_lens=(9,)), torch.device("cuda", torch.cuda.device_count() - 1)
    )
    batch.poison(math.nan, -1)
    rest = (batch.block_table, batch.cu_seqlens_q, batch.seq_lens)
    try:
        with torch.cuda.device(0):
            paged_attention(batch.q, batch.kv_cache, *rest, max_seqlen_q=1, max_seqlen_k=9)
    except InvalidInputError as error:
        assert "kernels launch on the current device, 0" in str(error), error
        return 0.0
    raise AssertionError("a kernel ran on tensors of another device than the current one")


def captured(problem: AttentionProblem, device: torch.device, limit: int) -> float:
    """A graph of one call, replayed with other queries of the same lengths."""
    planned = _Planned(problem, device)
    planned.run()
    q = planned.batch.q.clone()
    planned.batch.q.fill_(math.nan)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        planned.run()
    planned.batch.q.copy_(q)
    planned.out.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize(device)
    return planned.error()


def no_sync_no_allocation(problem: AttentionProblem, device: torch.device, limit: int) -> float:
    """What ``plan_attention``, and ``paged_attention`` with a plan, promise."""
    planned = _Planned(problem, device)
    planned.run()
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(6):  # More than there are host buffers of the work list.
            planned.make_plan()
            planned.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    allocations = torch.cuda.memory_stats(device)["allocation.all.allocated"] - before
    assert allocations == 0, f"{allocations} allocations on the device; the limit is 0"
    return planned.error()
