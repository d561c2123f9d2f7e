"""What a plan of Hopper's prefill holds and what its launches are passed, on a made-up H200: nothing runs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from tl_backend.configs.choice import default_config
from tl_backend.configs.decode import combine_threads
from tl_backend.configs.prefill_hopper import HopperPrefillConfig
from tl_backend.device import DeviceSpec
from tl_backend.ops import AttentionWorkspace, families, paged_attention, plan_attention, prepare
from tl_backend.ops.checks import unsupported_reason
from tl_backend.ops.compiled import KERNELS, KernelKey
from tl_backend.ops.decode import merged_problem
from tl_backend.ops.prepare import required_kernels
from tl_backend.problem import AttentionProblem
from tl_backend.telemetry import launches
from tl_backend.testing.cases import make_problem

H200 = DeviceSpec.absent("sm_90")
LLAMA = make_problem(32, 8, 128, 16, dtype="bfloat16", returns_lse=True)
CPU = torch.device("cpu")
Launch = tuple[KernelKey, tuple[float, ...]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Kernels that would have been launched, with their arguments."""
    found: list[Launch] = []
    monkeypatch.setattr(DeviceSpec, "of", classmethod(lambda cls, device: H200))
    monkeypatch.setattr(KERNELS, "get", lambda key: lambda *arguments: found.append((key, arguments)))
    return found


def workspace(problem: AttentionProblem = LLAMA, **changes: Any) -> AttentionWorkspace:
    return AttentionWorkspace(problem, CPU, max_num_reqs=8, max_num_tokens=8192, **changes)


def plan(space: AttentionWorkspace, lens: tuple[tuple[int, int], ...], *, bounds: bool = True) -> Any:
    query_lens, seq_lens = (torch.tensor(column, dtype=torch.int32) for column in zip(*lens, strict=True))
    starts = torch.cat([torch.zeros(1), query_lens.cumsum(0)]).int()
    return plan_attention(
        space.problem,
        starts,
        seq_lens,
        cu_seqlens_q_cpu=starts,
        max_seqlen_q=int(query_lens.max()),
        max_seqlen_k=int(seq_lens.max()),
        workspace=space,
        seq_lens_cpu_upper_bound=seq_lens if bounds else None,
    )


@pytest.mark.usefixtures("launched")
def test_a_long_context_is_cut_and_a_prompt_is_not() -> None:
    space = workspace()
    whole = plan(space, ((4096, 4096),)).prefill
    assert (whole.kind, whole.num_work, whole.pieces.combine) == ("prefill_hopper", 128, None)
    cut = plan(space, ((64, 32768),)).prefill
    assert (cut.num_work, cut.pieces.split.shape, cut.pieces.tokens_per_tile) == (16, (2, 4), 32)
    assert cut.pieces.combine is not None
    assert cut.pieces.split.data_ptr() == space.work[16:].data_ptr()
    assert cut.pieces.split.tolist() == [[0, 0, 8, 0], [0, 32, 8, 256]]
    assert sorted(row[2] for row in space.work[:16].tolist()) == sorted([p | 8 << 16 for p in range(8)] * 2)
    assert cut.pieces.partial_o.shape[0] >= 2 * 256
    assert space.counter.tolist() == [0]


@pytest.mark.usefixtures("launched")
def test_without_bounds_and_with_batch_invariance_nothing_is_cut() -> None:
    assert plan(workspace(), ((64, 32768),), bounds=False).prefill.pieces.combine is None
    space = workspace(batch_invariant=True)
    assert plan(space, ((64, 32768),)).prefill.pieces.combine is None
    assert space.partial_o.shape[0] == 0


def test_a_launch_passes_what_the_kernels_take(launched: list[Launch]) -> None:
    space = workspace()
    made = plan(space, ((64, 32768),))
    q = torch.zeros(70, 48, 128, dtype=torch.bfloat16)[:, :32]
    cache = torch.zeros(20, 8, 16, 256, dtype=torch.bfloat16)
    out = torch.zeros(70, 32, 128, dtype=torch.bfloat16)
    lse = torch.zeros(32, 80)[:, :70]
    table, starts = torch.zeros(1, 2048, dtype=torch.int32), torch.tensor([0, 64], dtype=torch.int32)
    seq_lens = torch.tensor([32768], dtype=torch.int32)
    before = launches.counts()
    paged_attention(
        q, cache, table, starts, seq_lens, max_seqlen_q=64, max_seqlen_k=32768, out=out, lse=lse, softmax_scale=0.5,
        plan=made,
    )  # fmt: skip
    (attention, passed), (combine, merged) = launched
    assert attention == KernelKey("prefill_hopper", LLAMA, default_config("prefill", LLAMA, H200), H200)
    assert passed == (
        q.data_ptr(), cache.data_ptr(), out.data_ptr(), lse.data_ptr(), 0, 0, 0, table.data_ptr(), starts.data_ptr(),
        seq_lens.data_ptr(), space.work.data_ptr(), space.counter.data_ptr(), space.partial_o.data_ptr(),
        space.partial_lse.data_ptr(),
        16, 70, 20, 2048, 0.5,
        48 * 16, 16, 8 * 16 * 32, 16 * 32, 32, 32 * 16, 16, 2048, 80,
    )  # fmt: skip
    assert combine == KernelKey("prefill_combine", merged_problem(LLAMA), combine_threads(LLAMA), H200)
    assert merged == (
        out.data_ptr(), lse.data_ptr(), 0, starts.data_ptr(), space.work[16:].data_ptr(), space.partial_o.data_ptr(),
        space.partial_lse.data_ptr(), 2, 32, 32 * 16, 16, 80,
    )  # fmt: skip
    after = launches.counts()
    for kind in ("prefill_hopper", "prefill_combine"):
        assert after[kind] == before.get(kind, 0) + 1
    assert launches.rows()["prefill_hopper"]["family default"] >= 1


@pytest.mark.usefixtures("launched")
def test_the_room_for_work_is_that_of_any_step() -> None:
    """As many tiles as there can be, each cut as often as there are pieces."""
    space = workspace()
    lens = (*((1025, 1025),) * 7, (1017, 120_000))
    made = plan(space, lens).prefill
    assert made.num_work + len(made.pieces.split) <= len(space.work)
    assert made.num_work >= 7 * 33 + 32


def test_what_is_required_has_the_combine_where_it_can_be_asked_for() -> None:
    kinds = [key.kind for key in required_kernels(LLAMA, H200)]
    assert kinds == ["prefill_hopper", "prefill_combine", "decode", "decode", "decode_combine", "cache_write"]
    invariant = [key.kind for key in required_kernels(LLAMA, H200, batch_invariant=True)]
    assert invariant == ["prefill_hopper", "cache_write"]
    portable = make_problem(32, 8, 80, 16, dtype="bfloat16")
    assert "prefill_combine" not in {key.kind for key in required_kernels(portable, H200)}
    assert unsupported_reason(portable, H200) is None


def test_a_row_whose_kernel_does_not_compile_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceSpec, "of", classmethod(lambda cls, device: H200))
    asked = []

    class Chooser:
        def configs(self, kind: str) -> tuple[Any, ...]:
            return (default_config(kind, LLAMA, H200),)

        def drop(self, kind: str, tile: Any, reason: str) -> bool:
            asked.append((kind, tile, reason))
            return True

    def refuse(keys: Iterable[KernelKey], **_: Any) -> dict[KernelKey, str]:
        return {key: "no such instruction" for key in keys if key.kind == "prefill_hopper"}

    monkeypatch.setitem(prepare.__globals__, "load_kernels", refuse)
    monkeypatch.setitem(prepare.__globals__, "chooser_for", lambda *_, **__: Chooser())
    prepare([LLAMA], CPU)
    ((kind, tile, reason),) = asked
    assert (kind, reason) == ("prefill", "no such instruction")
    assert isinstance(tile, HopperPrefillConfig)


@pytest.fixture
def log() -> Iterator[list[str]]:
    """vLLM, where a test has imported it, keeps its loggers from the root that pytest listens at."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    families.logger.addHandler(handler)
    families._say.cache_clear()
    yield lines
    families.logger.removeHandler(handler)


@pytest.mark.usefixtures("launched")
def test_what_hoppers_family_does_not_take_is_counted_and_named_once(log: list[str]) -> None:
    problem = make_problem(32, 8, 80, 16, dtype="bfloat16")
    what = "32/8 D80 bfloat16 page 16 causal: head size 80; 64, 96, 128, 160, 192, 224, 256 are taken"
    before = launches.events().get("portable_prefills", {}).get(what, 0)
    for _ in range(2):
        space = workspace(problem)
        made = plan(space, ((64, 32768), (1, 5)))
        assert (made.prefill.kind, made.prefill.pieces) == ("prefill", None)
        plan(space, ((1, 5),))  # No prefill.
    assert launches.events()["portable_prefills"][what] == before + 2
    assert log == [f"TileLang attention takes the portable prefill, not Hopper's own, for {what}."]
    plan(workspace(), ((64, 64),))
    assert len(log) == 1


def test_elsewhere_the_portable_family_is_no_news(log: list[str]) -> None:
    assert families.portable_reason(make_problem(32, 8, 80, 16), DeviceSpec.absent("c")) is None
    assert families.portable_reason(make_problem(32, 8, 80, 16, dtype="bfloat16"), DeviceSpec.absent("sm_80")) is None
    assert log == []
