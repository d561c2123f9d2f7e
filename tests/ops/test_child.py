"""A child's end leaves nothing behind."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tl_backend.errors import EnvironmentProblemError
from tl_backend.ops.child import Child, ChildLostError

START_S = 60.0


def dies_beside_its_compiler(connection: Connection) -> None:
    compiler = subprocess.Popen(["sleep", "3600"])
    connection.send(compiler.pid)
    connection.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def closes_its_pipe(connection: Connection) -> None:
    connection.send(None)
    connection.close()
    time.sleep(3600)


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_compiler_does_not_outlive_a_child_that_was_killed() -> None:
    """As the system does where memory is short: the compiler would go on with a core and its memory."""
    child = Child(dies_beside_its_compiler)
    compiler = child.receive(START_S)
    assert is_running(compiler)
    child.send(None)
    with pytest.raises(ChildLostError, match="killed by SIGKILL"):
        child.receive(START_S)
    wait_for_end([compiler])


def watches(connection: Connection) -> None:
    """Has a child of its own, beside a compiler; answers with its process and the compiler's, and waits."""
    child = Child(dies_beside_its_compiler)
    connection.send((child.pid, child.receive(START_S)))
    time.sleep(3600)


def wait_for_end(pids: list[int]) -> None:
    until = time.monotonic() + START_S
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(map(is_running, pids))


def test_a_child_and_its_compiler_do_not_outlive_a_parent_that_was_killed() -> None:
    parent = Child(watches)
    pids = parent.receive(START_S)
    assert all(map(is_running, pids))
    os.kill(parent.pid, signal.SIGKILL)
    wait_for_end(pids)
    parent.kill()


def test_a_fork_of_the_parent_that_exits_leaves_the_child_alone() -> None:
    program = (
        f"import os, sys, {__name__} as t\n"
        "child = t.Child(t.dies_beside_its_compiler)\n"
        "compiler = child.receive(t.START_S)\n"
        "fork = os.fork()\n"
        "if fork == 0:\n    sys.exit()\n"
        "os.waitpid(fork, 0)\n"
        "print(t.is_running(child.pid) and t.is_running(compiler))\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "True\n"


def test_a_daemonic_process_may_have_a_child(tmp_path: Path) -> None:
    """Workers of vLLM are such."""
    process = multiprocessing.get_context("spawn").Process(
        target=writes_an_answer, args=(tmp_path / "answer",), daemon=True
    )
    process.start()
    process.join(START_S)
    assert (tmp_path / "answer").read_text() == "None"


def writes_an_answer(path: Path) -> None:
    child = Child(closes_its_pipe)
    path.write_text(str(child.receive(START_S)))
    child.kill()


def test_files_of_the_current_folder_are_no_part_of_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path / "no string"])
    child = Child(closes_its_pipe)
    assert child.receive(START_S) is None
    child.kill()


def test_a_child_that_closes_its_pipe_is_killed() -> None:
    child = Child(closes_its_pipe)
    child.receive(START_S)
    with pytest.raises(ChildLostError, match="closed its pipe and did not end; killed"):
        child.receive(START_S)
    assert not is_running(child.pid)


def test_a_process_that_cannot_be_started_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(EnvironmentProblemError, match=r"got .*unavailable; .*Raise the limit of processes"):
        Child(closes_its_pipe)
