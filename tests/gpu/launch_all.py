"""Small launches of every kernel, on tensors that end where a kernel must end: what ``tests.gpu.sanitize`` watches.

Each tensor has the exact extent that a kernel may touch, so that one element too far is outside of it. On a GPU
``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` gives each an allocation of its own. What must not be read is NaN, or never written
with ``--uninitialised``. ``python -m tests.gpu.launch_all`` launches without looking at the answers.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tl_backend.configs.prefill_hopper import hopper_refusal
from tl_backend.device import DeviceSpec
from tl_backend.ops import (
    AttentionWorkspace,
    merge_attention,
    paged_attention,
    paged_cache_write,
    plan_attention,
    varlen_attention,
)
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.merge import merge_key
from tl_backend.ops.prepare import required_kernels
from tl_backend.ops.reference import (
    paged_attention_reference,
    paged_cache_write_reference,
    varlen_attention_reference,
)
from tl_backend.problem import AttentionProblem
from tl_backend.telemetry.launches import counts
from tl_backend.testing.cases import GARBAGE, Case, make_batch, make_problem
from tl_backend.testing.poison_judge import TOLERANCES, num_different, relative_rms
from tl_backend.testing.poison_run import features_of, forced_splits

CPU = torch.device("cpu")
FP8, BF16, FP16 = "float8_e4m3fn", "bfloat16", "float16"
# By how keys and values are read: TMA copies of whole tiles where a page is a multiple of the tile, else gathers.
# (heads, kv heads, head size, page, dtype on a GPU, features)
_PROBLEMS = {
    "tma128": (8, 2, 128, 128, BF16, {}),
    "tma128 D64 full": (4, 2, 64, 128, FP16, {"causal": False}),
    "tma128 D112": (2, 1, 112, 128, BF16, {}),
    "tma64 D256": (2, 1, 256, 64, BF16, {}),
    "gather16": (8, 2, 128, 16, BF16, {}),
    "gather16 D256": (4, 1, 256, 16, FP16, {}),
    "gather48 D80": (6, 2, 80, 48, BF16, {}),
    "gather64": (8, 2, 128, 64, FP16, {}),
    "gather32 71 heads": (71, 1, 64, 32, BF16, {}),
    "fp8 page16": (8, 2, 128, 16, BF16, {"kv_dtype": FP8}),
    "fp8 page128": (4, 1, 64, 128, FP16, {"kv_dtype": "float8_e5m2", "window": 37, "sinks_dtype": "float32"}),
    "window sinks": (8, 2, 64, 16, BF16, {"window": 50, "sinks_dtype": BF16}),
    "alibi cap lse": (6, 2, 96, 32, BF16, {"has_alibi": True, "soft_cap": 20.0, "returns_lse": True}),
    "cap lse D192": (6, 2, 192, 48, BF16, {"soft_cap": 20.0, "returns_lse": True}),
    "sinks D96": (4, 1, 96, 16, FP16, {"sinks_dtype": "float32"}),
    "D512 page64": (4, 1, 512, 64, BF16, {}),
    "D512 page16": (4, 2, 512, 16, FP16, {"causal": False}),
    "tma128 alibi lse": (4, 2, 64, 128, BF16, {"has_alibi": True, "returns_lse": True}),
    "contiguous": (8, 2, 128, None, BF16, {"causal": False, "returns_lse": True}),
    "contiguous window": (6, 2, 80, None, FP16, {"causal": False, "returns_lse": True, "window": 40}),
    "contiguous D512": (4, 2, 512, None, BF16, {"causal": False, "returns_lse": True}),
}
CACHE_WRITE, MERGE, SPLIT_PREFILL = "cache write", "halves and merge", "split prefill"
# Few tokens, whose keys Hopper's family splits: with a soft cap and the log-sum-exp, with sinks, with neither.
_SPLIT = ("tma128", "tma64 D256", "cap lse D192", "sinks D96")


def _case(query_lens: tuple[int, ...], seq_lens: tuple[int, ...], num_splits: int = 1) -> Case:
    return Case(query_lens=query_lens, seq_lens=seq_lens, q_view="dense", padding_rows=0, num_splits=num_splits)


# Odd; at, before and after the ends of tiles and pages; empty.
_BATCHES = {
    "prefill": _case((5, 130, 0, 17), (5, 301, 3, 128)),
    "decode": _case((1, 0, 1, 1, 1), (131, 9, 1, 256, 64)),
    "split decode": _case((1, 1, 1), (300, 129, 2), num_splits=3),
    "mixed": _case((1, 1, 7), (129, 33, 140)),
    "long prefill": _case((49,), (385,)),
    SPLIT_PREFILL: _case((3, 17), (40, 1500)),
}
# One of each kind for all problems before the next: a slow sanitizer may not come to the end.
_ORDER = ("prefill", SPLIT_PREFILL, MERGE, "decode", "split decode", CACHE_WRITE, "mixed", "long prefill")


@dataclass(frozen=True)
class Launch:
    """A problem and what is launched for it: a batch, ``CACHE_WRITE`` or ``MERGE``."""

    label: str
    problem: AttentionProblem
    what: str

    def __str__(self) -> str:
        return f"{self.label}, {self.what}"

    def run(self, device: torch.device, *, uninitialised: bool = False, compare: bool = True) -> float | None:
        """Launch; the relative RMS to the float64 reference, or None without a comparison."""
        if self.what == CACHE_WRITE:
            return _cache_write(self.problem, device, compare)
        if self.what == MERGE:
            return _merged_halves(self.problem, device, compare)
        joined, splits = counts().get("prefill_combine", 0), self.what == SPLIT_PREFILL
        error = _attention(self.problem, _BATCHES[self.what], device, uninitialised, compare, splits=splits)
        if splits and hopper_refusal(self.problem, DeviceSpec.of(device)) is None:
            assert counts().get("prefill_combine", 0) > joined, "no keys were split"
        return error


def launches(device: torch.device, only: str = "") -> list[Launch]:
    """All whose name has what the expression ``only`` looks for; in float32 on a CPU."""
    found = []
    for what in _ORDER:
        for label, (heads, kv_heads, head_dim, page, dtype, features) in _PROBLEMS.items():
            if (page is None) == (what == MERGE) and (what != SPLIT_PREFILL or label in _SPLIT):
                own = dict(features)
                if device.type == "cpu":
                    dtype = "float32"  # noqa: PLW2901
                    own |= {"sinks_dtype": "float32"} if "sinks_dtype" in own else {}
                found.append(Launch(label, make_problem(heads, kv_heads, head_dim, page, dtype=dtype, **own), what))
    return [launch for launch in found if re.search(only, str(launch))]


def keys(chosen: list[Launch], device: DeviceSpec) -> list[KernelKey]:
    """Every kernel of these launches, once."""
    found = []
    for launch in chosen:
        found += required_kernels(launch.problem, device)
        found += [merge_key(launch.problem, device)] if launch.what == MERGE else []
    return list(dict.fromkeys(found))


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """By a copy from the host, which initcheck follows, into an allocation of its own."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor.contiguous())


def _attention(
    problem: AttentionProblem, case: Case, device: torch.device, uninitialised: bool, compare: bool, *, splits: bool
) -> float | None:
    """With ``splits`` the plan knows each request's keys, without which a prefill splits none."""
    batch = make_batch(problem, case, CPU, seed=1)
    wanted = None
    if compare:
        batch.poison(0.0, 0)  # The reference multiplies what it masks.
        wanted = paged_attention_reference(
            batch.q, batch.kv_cache, batch.block_table, batch.cu_seqlens_q, batch.seq_lens, **features_of(batch)
        )
    batch.poison(math.nan, GARBAGE)
    # The batch's blocks without canaries and spare ones, in their order; as many columns as the longest request has.
    own = [batch.block_table[request, :count] for request, count in enumerate(batch.num_pages)]
    blocks = torch.cat(own).sort().values
    table = torch.full((len(own), max(batch.num_pages)), GARBAGE, dtype=torch.int32)
    for row, ids in zip(table, own, strict=True):
        row[: len(ids)] = torch.searchsorted(blocks, ids.contiguous())
    bits = torch.uint8 if problem.is_quantized else batch.kv_cache.dtype
    host = batch.kv_cache.view(bits)[blocks.long()]
    pool = torch.empty(host.shape, dtype=bits, device=device)
    if uninitialised:
        seen = batch.visible_S
        used = torch.zeros(len(batch.kv_cache), host.shape[2], dtype=torch.bool)
        used[batch.page_S[seen], batch.offset_S[seen]] = True
        for block, slots in enumerate(used[blocks.long()]):
            rows = slots.nonzero().flatten().tolist()
            for head in range(host.shape[1] if rows else 0):  # What is seen of a block lies together.
                pool[block, head, rows[0] : rows[-1] + 1].copy_(host[block, head, rows[0] : rows[-1] + 1])
    else:
        pool.copy_(host)
    # The end of a fused buffer: its last row ends where the buffer does.
    rows, heads, head_dim = batch.q.shape
    fused = torch.full((rows, 2 * problem.num_kv_heads + heads, head_dim), math.nan, dtype=batch.q.dtype)
    fused[:, -heads:] = batch.q
    out = torch.empty(rows, heads, head_dim, dtype=batch.q.dtype, device=device)
    lse = torch.empty(heads, rows, device=device) if problem.returns_lse else None
    if not uninitialised:
        out.fill_(math.nan)
    features = {k: upload(v, device) if isinstance(v, torch.Tensor) else v for k, v in features_of(batch).items()}
    starts, lens = upload(batch.cu_seqlens_q, device), upload(batch.seq_lens, device)
    longest = {"max_seqlen_q": max(case.query_lens), "max_seqlen_k": max(case.seq_lens)}
    with forced_splits(case.num_splits):
        plan = None
        if splits:
            workspace = AttentionWorkspace(problem, device, max_num_reqs=len(lens), max_num_tokens=rows)
            plan = plan_attention(
                problem, starts, lens,
                cu_seqlens_q_cpu=batch.cu_seqlens_q, seq_lens_cpu_upper_bound=batch.seq_lens, workspace=workspace,
                **longest,
            )  # fmt: skip
        paged_attention(
            upload(fused, device)[:, -heads:],
            pool.view(batch.kv_cache.dtype),
            upload(table, device),
            starts,
            lens,
            **longest,
            out=out,
            lse=lse,
            plan=plan,
            **features,
        )
    _synchronize(device)
    return None if wanted is None else relative_rms(out.cpu(), wanted)


def _cache_write(problem: AttentionProblem, device: torch.device, compare: bool) -> float | None:
    """Bits must be equal: 0 or infinity."""
    generator = torch.Generator().manual_seed(2)
    page, blocks = problem.page_size or 0, 3
    slots = [0, page - 1, page, blocks * page - 1, -1, blocks * page, 2**40 + 17, *range(page + 1, page + 12)]
    shape = (2, len(slots), problem.num_kv_heads, problem.head_dim)
    key, value = torch.randn(shape, generator=generator).to(getattr(torch, problem.dtype))
    kv_dtype = getattr(torch, problem.kv_dtype)
    width = 2 * problem.head_dim * kv_dtype.itemsize
    host = torch.full((blocks, problem.num_kv_heads, page, width), 0xFF, dtype=torch.uint8).view(kv_dtype)  # NaN.
    scales = {"k_scale": torch.tensor([0.04]), "v_scale": torch.tensor([3.0])} if problem.is_quantized else {}
    pool = upload(host, device)
    paged_cache_write(
        upload(key, device),
        upload(value, device),
        pool,
        upload(torch.tensor(slots), device),
        **{name: upload(scale, device) for name, scale in scales.items()},
    )
    _synchronize(device)
    if not compare:
        return None
    legal = torch.tensor([slot if 0 <= slot < blocks * page else -1 for slot in slots])
    paged_cache_write_reference(key, value, host, legal, **scales)
    return math.inf if num_different(pool.cpu(), host) else 0.0


def _merged_halves(problem: AttentionProblem, device: torch.device, compare: bool) -> float | None:
    """Contiguous keys in two halves, one of which is empty for some requests, and the merge of both."""
    generator = torch.Generator().manual_seed(3)
    dtype, heads = getattr(torch, problem.dtype), problem.num_q_heads
    query_lens, halves = (5, 130, 0, 17), ((5, 150, 3, 64), (0, 151, 1, 64))
    q = (2 * torch.randn(sum(query_lens), heads, problem.head_dim, generator=generator)).to(dtype)
    starts_q = torch.tensor([0, *query_lens]).cumsum(0).int()
    features = {"causal": problem.causal, "window": problem.window}
    parts, wanted, weights = [], [], []
    for lens in halves:
        k, v = torch.randn(2, sum(lens), problem.num_kv_heads, problem.head_dim, generator=generator).to(dtype)
        starts = torch.tensor([0, *lens]).cumsum(0).int()
        out, lse = torch.empty(q.shape, dtype=dtype, device=device), torch.empty(heads, len(q), device=device)
        on_device = [upload(tensor, device) for tensor in (q, k, v, starts_q, starts)]
        longest = {"max_seqlen_q": max(query_lens), "max_seqlen_k": max(lens)}
        varlen_attention(*on_device, **longest, out=out, lse=lse, **features)
        _synchronize(device)
        parts += [out, lse]
        if compare:
            weights.append(torch.empty(heads, len(q), dtype=torch.float64))
            wanted.append(varlen_attention_reference(q, k, v, starts_q, starts, lse=weights[-1], **features))
    merged = torch.empty(q.shape, dtype=dtype, device=device)
    merge_attention(*parts, out=merged, lse=torch.empty(heads, len(q), device=device))
    _synchronize(device)
    if not compare:
        return None
    # A row that sees no key in either half is NaN here and 0 there.
    share_THalf = torch.stack(weights).softmax(0).nan_to_num(0.0).transpose(1, 2)[..., None]
    return relative_rms(merged.cpu(), (share_THalf * torch.stack(wanted)).sum(0))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def run_all(
    chosen: list[Launch], device: torch.device, *, seconds: float = math.inf, uninitialised: bool = False, compare: bool
) -> Iterator[tuple[Launch, str]]:
    """Each launch and what is wrong with it, "" if nothing. None begins after ``seconds``.

    Prints a line before and after each, flushed: a sanitizer's reports come between.
    """
    begin, done = time.monotonic(), 0
    for launch in chosen:
        if time.monotonic() - begin > seconds:
            break
        print(f"CASE {launch}", flush=True)
        limit, message = TOLERANCES[launch.problem.dtype], ""
        try:
            error = launch.run(device, uninitialised=uninitialised, compare=compare)
            if error is not None and not error <= limit:
                message = f"relative RMS: got {error:.2e}; at most {limit:.0e} is rounding"
        except Exception as failure:  # noqa: BLE001
            message = f"{type(failure).__name__}: {failure}"
        print(f"{'WRONG' if message else 'DONE'} {launch} {message}".rstrip(), flush=True)
        done += 1
        yield launch, message
    print(f"LAUNCHED {done} of {len(chosen)} cases", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Launch; exit code 1 if something was refused or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", metavar="EXPRESSION")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no launch begins later")
    parser.add_argument("--uninitialised", action="store_true")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    chosen = launches(device, args.only)
    done = run_all(chosen, device, seconds=args.seconds, uninitialised=args.uninitialised, compare=False)
    return 1 if [launch for launch, message in done if message] else 0


if __name__ == "__main__":
    sys.exit(main())
