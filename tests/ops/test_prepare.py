"""Preparing a problem leaves nothing to compile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tl_backend.device import DeviceSpec
from tl_backend.errors import EnvironmentProblemError
from tl_backend.ops import compiled, paged_cache_write, prepare
from tl_backend.ops.compiled import KERNELS_EVENT, WHILE_SERVING, KernelCache
from tl_backend.ops.kernel_store import KernelStore
from tl_backend.ops.launcher import Artifact
from tl_backend.ops.prepare import load_kernels, required_kernels
from tl_backend.telemetry import launches
from tl_backend.testing.cases import Case, make_problem
from tl_backend.testing.poison import check_attention

CPU = torch.device("cpu")


def test_nothing_compiles_after_prepare(
    fresh_kernels: KernelCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TL_BACKEND_CACHE_DIR", str(tmp_path))
    problem = make_problem(6, 3, 32, 16)
    seen = []
    prepared = prepare([problem], CPU, on_progress=lambda *progress: seen.append(progress))
    assert (prepared.compiled, prepared.loaded) == (5, 0)
    assert [(done, total) for done, total, _ in seen] == [(done, 5) for done in range(6)]
    assert sorted(kind for *_, kind in seen) == ["", "cache_write", "decode", "decode", "decode_combine", "prefill"]
    for num_splits in (1, 4):
        check_attention(problem, Case(query_lens=(1, 1, 9), seq_lens=(1, 50, 9), num_splits=num_splits), CPU)
    paged_cache_write(
        torch.zeros(1, 3, 32), torch.zeros(1, 3, 32), torch.zeros(1, 3, 16, 64), torch.zeros(1, dtype=torch.int64)
    )
    assert fresh_kernels.num_compiled == 0


def test_what_never_decodes_compiles_no_decode() -> None:
    device, paged, contiguous = DeviceSpec.of(CPU), make_problem(6, 3, 32, 16), make_problem(6, 3, 32, None)
    assert [key.kind for key in required_kernels(paged, device, batch_invariant=True)] == ["prefill", "cache_write"]
    assert [key.kind for key in required_kernels(contiguous, device)] == ["prefill"]


def test_problems_that_differ_only_in_queries_share_the_cache_write() -> None:
    device = DeviceSpec.of(CPU)
    one, other = (set(required_kernels(make_problem(heads, 2, 64, 16), device)) for heads in (4, 8))
    assert {key.kind for key in one & other} == {"cache_write"}


def test_a_problem_of_another_group_finds_what_the_first_left(
    fresh_kernels: KernelCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CASES.md C5, C6: a second process, or start, compiles nothing."""
    monkeypatch.setenv("TL_BACKEND_CACHE_DIR", str(tmp_path))
    problem = make_problem(6, 3, 32, 16)
    assert prepare([problem], CPU)[:2] == (5, 0)
    assert prepare([problem], CPU)[:2] == (0, 0)  # They are here.
    fresh_kernels._kernels.clear()
    seen: list[object] = []
    assert prepare([problem], CPU, on_progress=lambda *progress: seen.append(progress))[:2] == (0, 5)
    assert seen == []


def test_what_compiles_after_prepare_is_counted_and_named(
    fresh_kernels: KernelCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TL_BACKEND_CACHE_DIR", str(tmp_path))
    while_serving = launches.events().get(KERNELS_EVENT, {}).get(WHILE_SERVING, 0)
    first, second = (make_problem(2, 2, 32, page_size) for page_size in (16, 32))
    key = required_kernels(second, DeviceSpec.of(CPU))[-1]
    prepare([first], CPU)
    monkeypatch.setattr(compiled, "_compile", lambda key: (None, None))
    monkeypatch.setattr(compiled.Launcher, "of", lambda *_, **__: print)
    with caplog.at_level("WARNING", compiled.logger.name):
        fresh_kernels.get(key)
        fresh_kernels.get(key)
    assert fresh_kernels.num_compiled == 1
    assert launches.events()[KERNELS_EVENT][WHILE_SERVING] == while_serving + 1
    assert [record.getMessage()[:22] for record in caplog.records] == ["compiling cache_write "]


def test_a_library_that_does_not_load_here_is_compiled_anew(
    fresh_kernels: KernelCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of an image with a newer system that shares the cache: whole, and of no use here."""
    monkeypatch.setenv("TL_BACKEND_CACHE_DIR", str(tmp_path))
    key = required_kernels(make_problem(6, 3, 32, 16), DeviceSpec.of(CPU))[-1]
    library = tmp_path / "not a library"
    library.write_text("of another machine")
    store = KernelStore(tmp_path)
    store.put(key, Artifact(str(library), ("handle",), False))
    assert load_kernels([key]) == {}
    assert key in fresh_kernels
    monkeypatch.setattr(compiled.Launcher, "load", refuse_to_load)
    other = required_kernels(make_problem(6, 3, 32, 32), DeviceSpec.of(CPU))[-1]
    assert load_kernels([other]) == {other: "it does not load"}


def refuse_to_load(artifact: Artifact) -> None:
    raise EnvironmentProblemError("it does not load")
