"""A process of its own that answers requests: its crash or hang costs the request, not the caller."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from tl_backend.errors import EnvironmentProblemError, TLBackendError, describe

# A process in the middle of a driver's call dies when that ends: nobody waits for it for ever.
KILL_S = 30.0
# How often a child looks whether its parent is there: one that was killed closes its pipe, but a compiler goes on.
WATCH_S = 1.0
# Called in the child with its end of a pipe; returns when the pipe ends.
Serve = Callable[[Connection], None]


class ChildLostError(TLBackendError, RuntimeError):
    """A child died or was killed because it did not answer; the message says which."""


# ``sys.path`` first: it says where this package is.
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tl_backend.ops import child; child.run()"


class Child:
    """A process that serves one end of a pipe.

    A fresh one, since a process that has used CUDA cannot fork; and none of ``multiprocessing``, which starts no
    process from a daemonic one, such as vLLM's workers, and runs the main program's file again. It leads a session of
    its own, so that Ctrl-C reaches the parent alone, which then ends the child and whatever compiler it has started.

    Args:
        serve: a function at the top of a module.
        log: file that what the child prints is appended to. Default: where the parent's goes.

    Raises:
        EnvironmentProblemError: no process can be started.
    """

    def __init__(self, serve: Serve, *, log: Path | None = None) -> None:
        ends: tuple[Connection, ...] = ()
        try:
            ends = self.connection, theirs = Pipe()
            what = [serve.__module__, serve.__name__, theirs.fileno(), os.getpid(), None if log is None else str(log)]
            paths = [path for path in sys.path if isinstance(path, str)]
            self._process = subprocess.Popen(
                # Nothing of the current folder, whatever its name, comes before the parent's path.
                [sys.executable, *_flags(), "-c", _PROGRAM, json.dumps(paths), json.dumps(what)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            for end in ends:
                end.close()
            raise EnvironmentProblemError(
                describe(
                    "process",
                    value=error,
                    limit="this user must be able to start one more",
                    remedy="Raise the limit of processes, files or memory, of `ulimit` or of the container.",
                )
            ) from error
        theirs.close()
        # Also where this process exits.
        self._end = weakref.finalize(self, _end, self._process, self.connection, os.getpid())

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, request: Any) -> None:
        """Send a request.

        Raises:
            ChildLostError: the child is dead.
        """
        try:
            self.connection.send(request)
        except OSError:
            raise ChildLostError(self._death()) from None

    def receive(self, seconds: float) -> Any:
        """The next answer. A child that gives none in time is killed.

        Raises:
            ChildLostError: the child died or was killed.
        """
        if not self.connection.poll(max(0.0, seconds)):
            self.kill()
            raise ChildLostError(f"no answer within {seconds:.0f} s; killed")
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            raise ChildLostError(self._death()) from None

    def kill(self) -> None:
        """End the child and what it has started, at once."""
        self._end()

    def _death(self) -> str:
        watch = os.pidfd_open(self.pid)
        try:
            ended = wait([watch], 5)  # Its pipe ended; it may still be on its way out.
        finally:
            os.close(watch)
        self.kill()  # Before anything asks for its code: until then nobody else can have its number.
        code = self._process.returncode
        if not ended or code is None:
            return "closed its pipe and did not end; killed"
        if code >= 0:
            return f"exited with code {code}"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"


def _flags() -> list[str]:
    if sys.flags.isolated:
        return ["-I"]
    return ["-P"] if sys.version_info >= (3, 11) else []


def _end(process: subprocess.Popen[bytes], connection: Connection, owner: int) -> None:
    if os.getpid() != owner:  # A fork of the parent exits; the child is not its own.
        return
    # Its session: a compiler would outlive it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_S)
    connection.close()


def run() -> None:
    """What the process of a child does."""
    module, name, descriptor, parent, log = json.loads(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent,), name="parent watch", daemon=True).start()
    connection = Connection(descriptor)
    if log is not None:
        with Path(log).open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    try:
        getattr(importlib.import_module(module), name)(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # Without the parent neither this process nor a compiler that it has started has anything to do.
        os.killpg(0, signal.SIGKILL)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os.killpg(0, signal.SIGKILL)
