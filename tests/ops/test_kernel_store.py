"""The kernel store: a kernel is found again under everything that its code depends on, whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tl_backend.configs.prefill import default_prefill_config
from tl_backend.device import DeviceSpec
from tl_backend.errors import EnvironmentProblemError
from tl_backend.ops import kernel_store
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.kernel_store import BAD_ENTRIES, KernelStore, digest
from tl_backend.ops.launcher import Artifact
from tl_backend.ops.prefill import prefill_key
from tl_backend.telemetry import launches
from tl_backend.testing.cases import make_problem

DEVICE = DeviceSpec.of(torch.device("cpu"))
PROBLEM = make_problem(8, 2, 64, 16)
KEY = prefill_key(PROBLEM, default_prefill_config(PROBLEM, DEVICE), DEVICE)


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    return KernelStore(tmp_path / "cache")


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    library = tmp_path / "built.so"
    library.write_bytes(os.urandom(5000))
    return Artifact(str(library), ("handle", "int64"), False)


def test_what_was_put_is_found(store: KernelStore, artifact: Artifact) -> None:
    assert store.find(KEY) is None
    stored = store.put(KEY, artifact)
    assert store.find(KEY) == stored
    assert Path(stored.path).read_bytes() == Path(artifact.path).read_bytes()
    assert stored[1:] == artifact[1:]
    assert sorted(path.suffix for path in store.folder.iterdir()) == [".json", ".so"]
    other = dataclasses.replace(PROBLEM, page_size=32)
    assert store.find(KEY._replace(problem=other)) is None


def test_a_digest_changes_with_all_that_the_code_depends_on_and_not_with_the_devices_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CASES.md C9, C16. The name may differ between the machine that filled the store and the one that reads it."""
    changed = [
        KEY,
        KEY._replace(kind="decode"),
        KEY._replace(problem=dataclasses.replace(PROBLEM, window=100)),
        KEY._replace(config=dataclasses.replace(KEY.config, block_n=KEY.config.block_n + 16)),
        KEY._replace(config=128),
        KEY._replace(device=DeviceSpec.absent("sm_90")),
        KEY._replace(device=DeviceSpec.absent("sm_90", multiprocessors=114)),
    ]
    found = [digest(key) for key in changed]
    for name, value in (("_version", "9.9"), ("source_hash", "other")):
        monkeypatch.setattr(kernel_store, name, lambda *_, value=value: value)
        found.append(digest(KEY))
    assert len(set(found)) == len(found)
    monkeypatch.undo()
    assert digest(KEY) == digest(KEY._replace(device=dataclasses.replace(DEVICE, name="another CPU"))) == found[0]


def test_a_digest_is_the_same_in_another_process() -> None:
    """CASES.md C7: a key that depends on what was built before, or on a hash seed, is never found again."""
    program = f"import {__name__} as t; print(t.digest(t.KEY))"
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert answers == {digest(KEY)}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"what": 1}', b"null"],
    ids=["empty", "cut", "list", "binary", "int", "null"],
)
def test_a_bad_entry_costs_one_count_and_is_replaced(store: KernelStore, artifact: Artifact, content: bytes) -> None:
    entry = Path(store.put(KEY, artifact).path).with_suffix(".json")
    entry.write_bytes(content)
    before = launches.events().get(BAD_ENTRIES, {}).get(digest(KEY), 0)
    assert store.find(KEY) is None
    assert launches.events()[BAD_ENTRIES][digest(KEY)] == before + 1
    store.put(KEY, artifact)
    assert store.find(KEY) is not None


def test_an_entry_under_another_kernels_name_is_not_taken(store: KernelStore, artifact: Artifact) -> None:
    library, other = Path(store.put(KEY, artifact).path), KEY._replace(kind="decode")
    for path in (library, library.with_suffix(".json")):
        (store.folder / f"{digest(other)}{path.suffix}").write_bytes(path.read_bytes())
    assert store.find(other) is None


def test_an_entry_with_arguments_that_nobody_knows_is_not_taken(store: KernelStore, artifact: Artifact) -> None:
    store.put(KEY, artifact._replace(types=("handle", "float16")))
    assert store.find(KEY) is None


def test_a_folder_that_is_named_from_here_is_found_from_elsewhere(
    tmp_path: Path, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = KernelStore(Path())
    assert store.put(KEY, artifact).path.startswith(str(tmp_path))
    monkeypatch.chdir("/")
    assert store.find(KEY) is not None


@pytest.mark.parametrize("fault", ["cut", "changed", "gone", "folder"])
def test_a_library_that_is_not_what_was_stored_is_not_loaded(
    store: KernelStore, artifact: Artifact, fault: str
) -> None:
    library = Path(store.put(KEY, artifact).path)
    content = library.read_bytes()
    library.unlink()
    if fault == "cut":
        library.write_bytes(content[:-1])
    elif fault == "changed":
        library.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif fault == "folder":
        library.mkdir()
    assert store.find(KEY) is None


def test_another_compiler_compiles_anew_and_none_takes_what_is_there(
    store: KernelStore, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES.md C17: an image without a compiler serves from the kernels that were built into it."""
    stored = store.put(KEY, artifact)
    monkeypatch.setattr(kernel_store, "compiler_version", lambda device: "g++ 99")
    assert store.find(KEY) is None
    monkeypatch.setattr(kernel_store, "compiler_version", lambda device: None)
    assert store.find(KEY) == stored


def test_a_writer_that_fails_leaves_nothing_and_says_so(
    store: KernelStore, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, and CASES.md C3: a network file system that is busy."""

    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(
        EnvironmentProblemError, match=r"kernel cache .*No space left on device; .*TL_BACKEND_CACHE_DIR"
    ):
        store.put(KEY, artifact)
    assert list(store.folder.iterdir()) == []
    assert store.find(KEY) is None


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path, artifact: Artifact) -> None:
    (tmp_path / "file").touch()
    store = KernelStore(tmp_path / "file" / "cache")
    for attempt in (lambda: store.put(KEY, artifact), lambda: store.lock(KEY)):
        with pytest.raises(EnvironmentProblemError, match=r"Not a directory; .*set TL_BACKEND_CACHE_DIR"):
            attempt()
    assert store.find(KEY) is None


def test_one_holder_at_a_time(store: KernelStore) -> None:
    first = store.lock(KEY)
    assert first is not None
    assert store.lock(KEY) is None
    other = store.lock(KEY._replace(kind="decode"))
    assert other is not None
    first.release()
    first.release()
    again = store.lock(KEY)
    assert again is not None
    again.release()
    other.release()


def test_a_lock_ends_with_its_process(store: KernelStore) -> None:
    """CASES.md C2: what a process that was killed leaves behind keeps nobody waiting."""
    program = (
        f"import sys, time; from pathlib import Path; import {__name__} as t; "
        "lock = t.KernelStore(Path(sys.argv[1])).lock(t.KEY); print(lock is not None, flush=True); time.sleep(3600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(store.folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        assert store.lock(KEY) is None
        process.send_signal(signal.SIGKILL)
    assert store.lock(KEY) is not None


def test_a_fork_that_lives_keeps_no_lock(store: KernelStore) -> None:
    lock = store.lock(KEY)
    assert lock is not None
    fork = os.fork()
    if fork == 0:
        signal.pause()
    try:
        lock.release()
        assert store.lock(KEY) is not None
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


def test_locks_of_another_user_keep_nobody_from_building(store: KernelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    store.folder.mkdir()
    monkeypatch.setattr(os, "open", refuse)
    assert store.lock(KEY) is not None
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(EnvironmentProblemError, match="Permission denied"):
        store.lock(KEY)


def test_a_file_system_without_locks_serves(store: KernelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert store.lock(KEY) is not None
    assert store.lock(KEY) is not None


def test_an_entry_says_what_it_is(store: KernelStore, artifact: Artifact) -> None:
    entry = json.loads(Path(store.put(KEY, artifact).path).with_suffix(".json").read_text())
    assert entry["what"].startswith("prefill of AttentionProblem(num_q_heads=8")
    assert entry["compiler"] == kernel_store.compiler_version(DEVICE)


def test_keys_are_of_plain_values(store: KernelStore) -> None:
    with pytest.raises(TypeError):
        digest(KernelKey("prefill", PROBLEM, object(), DEVICE))
