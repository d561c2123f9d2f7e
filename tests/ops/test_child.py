"""A child's end leaves nothing behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
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
    until = time.monotonic() + START_S
    while is_running(compiler) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_running(compiler)


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
