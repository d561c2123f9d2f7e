"""Python time of one attention layer and of a step's plan: kernels are replaced by a function that does nothing.

Run ``python -m benchmarks.layer_overhead --out benchmarks/results/layer_overhead_h200.json``. Without a GPU the plans
are those of an H200. The peer is vLLM's FlashAttention layer, whose two operations do nothing either.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import vllm

from tl_backend import ops
from tl_backend.device import DeviceSpec
from tl_backend.measure.results import environment, write_results
from tl_backend.ops import cache_write
from tl_backend.ops.compiled import KERNELS
from tl_backend.vllm_plugin.builder import TileLangMetadata
from tl_backend.vllm_plugin.impl import TileLangImpl
from tl_backend.vllm_plugin.layer import problem_of

H, HK, D, PAGE, LAYERS = 32, 8, 128, 16, 32
DTYPE = torch.bfloat16


class Case(NamedTuple):
    """Attributes: name; query_lens, seq_lens: of each request; kv_cache_dtype: as vLLM spells it."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    kv_cache_dtype: str = "auto"


CASES = (
    Case("decode 32", (1,) * 32, (2048,) * 32),
    Case("decode 32, fp8", (1,) * 32, (2048,) * 32, "fp8"),
    Case("prefill 4 x 2048", (2048,) * 4, (2048,) * 4),
    Case("extend 64 at 32768", (64,), (32768,)),
    Case("16 decodes, 512 at 8192", (*(1,) * 16, 512), (*(2048,) * 16, 8192)),
)


@dataclasses.dataclass
class Row:
    """Microseconds, medians.

    Attributes:
        case: its name.
        layer_us: cache write and attention of a layer, the mean of a step's layers.
        plan_us: the step's plan.
        peer_layer_us: vLLM's FlashAttention layer; None where it cannot be imported.
    """

    case: str
    layer_us: float
    plan_us: float
    peer_layer_us: float | None


def nothing(*_: Any, **__: Any) -> None:
    """In place of a kernel."""


@contextmanager
def without_kernels(device: torch.device) -> Iterator[None]:
    """Every kernel does nothing, and is never compiled; without a GPU all believe in an H200."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(KERNELS, "get", lambda key: nothing))
        stack.enter_context(patch.dict(cache_write.CHECKED, clear=True))  # They hold kernels.
        if device.type == "cpu":
            absent = DeviceSpec.absent("sm_90")
            stack.enter_context(patch.object(DeviceSpec, "of", classmethod(lambda cls, device: absent)))
        yield


class Step:
    """The tensors of a step: of each layer its own, as vLLM makes them, though in one place."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, rows = case, sum(case.query_lens)
        self.starts_cpu = torch.tensor([0, *case.query_lens]).cumsum(0).int()
        self.starts = self.starts_cpu.to(device)
        self.lens_cpu = torch.tensor(case.seq_lens, dtype=torch.int32)
        self.lens = self.lens_cpu.to(device)
        self.table = torch.zeros(len(case.seq_lens), max(case.seq_lens) // PAGE, dtype=torch.int32, device=device)
        self.slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self.max_q, self.max_k, self.rows = max(case.query_lens), max(case.seq_lens), rows
        kv_dtype = DTYPE if case.kv_cache_dtype == "auto" else torch.uint8
        cache = torch.zeros(8, HK, PAGE, 2 * D, dtype=kv_dtype, device=device)
        qkv = torch.zeros(rows, (H + 2 * HK) * D, dtype=DTYPE, device=device)
        out = torch.zeros(rows, H, D, dtype=DTYPE, device=device)
        one = torch.ones(1, device=device)
        self.layer = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
        self.tensors = []
        for _ in range(LAYERS):
            q, k, v = (x.view(rows, -1, D) for x in qkv.split([H * D, HK * D, HK * D], dim=1))
            self.tensors.append((q, k, v, cache.view(cache.shape), out.view(out.shape)))

    @property
    def common(self) -> dict[str, Any]:
        """What the metadata of both layers have."""
        return {
            "num_actual_tokens": self.rows,
            "max_query_len": self.max_q,
            "query_start_loc": self.starts,
            "max_seq_len": self.max_k,
            "seq_lens": self.lens,
            "block_table": self.table,
            "slot_mapping": self.slots,
        }

    def run(self, impl: Any, metadata: Any) -> None:
        """All layers, as vLLM calls them."""
        layer, slots = self.layer, self.slots
        for q, k, v, cache, out in self.tensors:
            impl.do_kv_cache_update(layer, k, v, cache, slots)
            impl.forward(layer, q, k, v, cache, metadata, output=out)


def make(impl: Callable[..., Any], case: Case) -> Any:
    """A layer, while torch's default dtype is the model's."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        return impl(H, D, D**-0.5, HK, None, None, case.kv_cache_dtype)
    finally:
        torch.set_default_dtype(before)


class Own:
    """This package's layer and plan."""

    def __init__(self, step: Step, device: torch.device) -> None:
        self.impl, self.step = make(TileLangImpl, step.case), step
        self.problem = problem_of(self.impl.shape, page_size=PAGE)
        self.workspace = ops.AttentionWorkspace(self.problem, device, max_num_reqs=256, max_num_tokens=8192)

    def plan(self) -> ops.AttentionPlan:
        step = self.step
        return ops.plan_attention(
            self.problem,
            step.starts,
            step.lens,
            cu_seqlens_q_cpu=step.starts_cpu,
            max_seqlen_q=step.max_q,
            max_seqlen_k=step.max_k,
            workspace=self.workspace,
            seq_lens_cpu_upper_bound=step.lens_cpu,
        )

    def metadata(self, plan: ops.AttentionPlan) -> TileLangMetadata:
        return TileLangMetadata(**self.step.common, plans={self.impl.shape: plan})


@contextmanager
def peer(step: Step) -> Iterator[Callable[[], None] | None]:
    """The layers of vLLM's FlashAttention as a function, with nothing for its two operations; None without vLLM's."""
    try:
        from vllm.v1.attention.backends import flash_attn
    except ImportError:
        yield None
        return
    operations = dict.fromkeys(("reshape_and_cache_flash", "_FA4_DENSE_ATTENTION_KERNEL"), nothing)
    answers = {
        "get_flash_attn_version": lambda **_: 3,
        "flash_attn_supports_kv_cache_dtype": lambda *_, **__: True,
        "flash_attn_supports_quant_query_input": lambda: True,
    }
    with ExitStack() as stack:
        for name, value in (operations | answers).items():
            stack.enter_context(patch.object(flash_attn, name, value, create=True))
        impl = make(flash_attn.FlashAttentionImpl, step.case)
        metadata = flash_attn.FlashAttentionMetadata(**step.common)
        yield lambda: step.run(impl, metadata)


def microseconds(action: Callable[[], Any]) -> tuple[float, Any]:
    """What a call took, and what it returned."""
    begin = time.perf_counter_ns()
    result = action()
    return (time.perf_counter_ns() - begin) / 1e3, result


def measure(case: Case, device: torch.device, rounds: int) -> Row:
    """Plan, layers and peer take turns; the medians of all rounds."""
    step = Step(case, device)
    plans, layers, peers = [], [], []
    with without_kernels(device), peer(step) as run_peer:
        own = Own(step, device)
        gc.disable()
        try:
            for _ in range(rounds):
                plan_us, plan = microseconds(own.plan)
                metadata = own.metadata(plan)
                plans.append(plan_us)
                layers.append(microseconds(lambda: step.run(own.impl, metadata))[0] / LAYERS)  # noqa: B023
                if run_peer is not None:
                    peers.append(microseconds(run_peer)[0] / LAYERS)
        finally:
            gc.enable()
    median = statistics.median
    return Row(case.name, median(layers), median(plans), median(peers) if peers else None)


def line(row: Row) -> str:
    """For people."""
    beside = "no peer here" if row.peer_layer_us is None else f"FLASH_ATTN's layer {row.peer_layer_us:6.1f} us"
    return f"{row.case:24} layer {row.layer_us:6.1f} us  plan {row.plan_us:6.1f} us  {beside}"


def main(words: list[str] | None = None) -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--rounds", type=int, default=300, help="steps that are measured (default %(default)s)")
    arguments = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for case in CASES:
        rows.append(measure(case, device, arguments.rounds))
        print(line(rows[-1]), flush=True)
    if arguments.out is not None:
        written = [dataclasses.asdict(row) for row in rows]
        of = {"environment": environment(device), "layers": LAYERS, "peer": f"FLASH_ATTN of vLLM {vllm.__version__}"}
        write_results(arguments.out, {**of, "rows": written})


if __name__ == "__main__":
    main()
