"""Kernels are built once, by whichever process comes first, and nobody waits for one that is gone."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests.ops.fake_pool import CONTENT, KEYS, FakePool
from tl_backend.errors import EnvironmentProblemError
from tl_backend.ops import build, kernel_store
from tl_backend.ops.build import build_kernels
from tl_backend.ops.kernel_store import KernelStore
from tl_backend.ops.launcher import Artifact

PROCESSES, ROUNDS = 8, 20


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakePool]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(build, "CompilePool", FakePool)
    monkeypatch.setattr(FakePool, "errors", {}, raising=False)
    monkeypatch.setattr(FakePool, "added", [], raising=False)
    return FakePool


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    return KernelStore(tmp_path / "cache")


def test_what_is_missing_is_built_and_what_is_there_is_not(pool: type[FakePool], store: KernelStore) -> None:
    build_kernels(KEYS[:2], store=store)
    seen: list[tuple[int, int, str]] = []
    found = build_kernels([*KEYS, KEYS[0]], store=store, on_progress=lambda *progress: seen.append(progress))
    assert pool.added == KEYS
    assert seen == [(0, 4, ""), *((done, 4, "copy") for done in range(1, 5))]
    assert [store.find(key) for key in KEYS] == [found[key] for key in KEYS]
    assert list(Path(tempfile.gettempdir()).iterdir()) == []  # What TileLang leaves there.
    seen.clear()
    assert build_kernels(KEYS, store=store, on_progress=lambda *progress: seen.append(progress)) == found
    assert seen == []


def test_keys_whose_programs_are_the_same_share_what_the_compiler_made(
    pool: type[FakePool], store: KernelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "same_program", True)
    found = build_kernels(KEYS, store=store)
    assert [store.find(key) for key in KEYS] == [found[key] for key in KEYS]
    assert list(Path(tempfile.gettempdir()).iterdir()) == []


def test_a_kernel_that_does_not_compile_costs_itself_and_is_tried_again(
    pool: type[FakePool], store: KernelStore
) -> None:
    pool.errors[KEYS[1]] = "error: no such instruction"
    found = build_kernels(KEYS, store=store)
    assert [key for key in KEYS if isinstance(found[key], str)] == [KEYS[1]]
    assert found[KEYS[1]] == "error: no such instruction"
    pool.errors.clear()
    assert isinstance(build_kernels(KEYS, store=store)[KEYS[1]], Artifact)


def test_processes_beside_each_other_build_each_kernel_once(tmp_path: Path) -> None:
    """CASES.md C1, C8: ranks that start at once, in an empty folder."""
    folders = [tmp_path / str(number) for number in range(ROUNDS)]
    for folder in folders:
        folder.mkdir()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ops.fake_pool", *map(str, folders)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(PROCESSES)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    answers = [process.communicate("go\n") for process in processes]
    assert [process.returncode for process in processes] == [0] * PROCESSES, answers
    for folder in folders:
        assert sorted((folder / "log").read_text().split()) == [str(key.config) for key in KEYS]
        assert not list((folder / "cache").glob("*.partial"))


def test_what_another_process_is_at_is_waited_for(pool: type[FakePool], store: KernelStore) -> None:
    theirs = store.lock(KEYS[0])
    assert theirs is not None

    def publish() -> None:
        (artifact,) = build_kernels(KEYS[1:2], store=KernelStore(store.folder / "elsewhere")).values()
        assert isinstance(artifact, Artifact)
        store.put(KEYS[0], artifact)
        theirs.release()

    other = threading.Timer(3 * build.POLL_S, publish)
    other.start()
    found = build_kernels(KEYS[:1], store=store)
    other.join()
    assert found[KEYS[0]] == store.find(KEYS[0])
    assert pool.added == [KEYS[1]]


def test_a_kernel_that_is_there_is_taken_whoever_holds_its_lock(pool: type[FakePool], store: KernelStore) -> None:
    (artifact,) = build_kernels(KEYS[1:2], store=KernelStore(store.folder / "elsewhere")).values()
    assert isinstance(artifact, Artifact)
    theirs = store.lock(KEYS[0])
    other = threading.Timer(3 * build.POLL_S, lambda: store.put(KEYS[0], artifact))
    other.start()
    assert isinstance(build_kernels(KEYS[:1], store=store)[KEYS[0]], Artifact)
    other.join()
    assert pool.added == [KEYS[1]]
    assert theirs is not None
    theirs.release()


def test_a_process_that_was_killed_at_it_is_replaced(pool: type[FakePool], store: KernelStore) -> None:
    theirs = store.lock(KEYS[0])
    assert theirs is not None
    other = threading.Timer(3 * build.POLL_S, theirs.release)  # As the system does; nothing was published.
    other.start()
    assert isinstance(build_kernels(KEYS[:1], store=store)[KEYS[0]], Artifact)
    other.join()
    assert pool.added == KEYS[:1]


def test_a_process_that_was_stopped_is_waited_for_within_a_bound(
    pool: type[FakePool], store: KernelStore, caplog: pytest.LogCaptureFixture
) -> None:
    """CASES.md C2."""
    theirs = store.lock(KEYS[0])
    with caplog.at_level("WARNING", kernel_store.logger.name):
        found = build_kernels(KEYS[:1], store=store, timeout_s=0.5)
    assert isinstance(found[KEYS[0]], Artifact)
    assert Path(found[KEYS[0]].path).read_bytes() == CONTENT
    assert [record.getMessage()[:30] for record in caplog.records] == ["another process has been at co"]
    assert theirs is not None
    theirs.release()


def test_a_store_that_cannot_be_written_is_an_error_only_where_something_is_missing(
    pool: type[FakePool], store: KernelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES.md C5: a cache that came with a read-only image."""
    found = build_kernels(KEYS[:2], store=store)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert build_kernels(KEYS[:2], store=store) == found
    with pytest.raises(EnvironmentProblemError, match=r"kernel cache .*Permission denied; .*TL_BACKEND_CACHE_DIR"):
        build_kernels(KEYS[:3], store=store)


def test_without_a_compiler_what_is_there_serves_and_the_rest_is_one_clear_error(
    pool: type[FakePool], store: KernelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES.md C17."""
    found = build_kernels(KEYS[:2], store=store)
    monkeypatch.setattr(build, "environment_problem", lambda device: "compiler: got none; one is needed.")
    monkeypatch.setattr(kernel_store, "compiler_version", lambda device: None)
    assert build_kernels(KEYS[:2], store=store) == found
    with pytest.raises(EnvironmentProblemError, match="compiler: got none"):
        build_kernels(KEYS[:3], store=store)
