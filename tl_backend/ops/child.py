"""A process of its own that answers requests: its crash or hang costs the request, not the caller."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tl_backend.errors import EnvironmentProblemError, TLBackendError, describe

# A process in the middle of a driver's call dies when that ends: nobody waits for it for ever.
KILL_S = 30.0
# Called in the child with its end of a pipe; returns when the pipe ends.
Serve = Callable[[Connection], None]


class ChildLostError(TLBackendError, RuntimeError):
    """A child died or was killed because it did not answer; the message says which."""


class Child:
    """A spawned process that serves one end of a pipe.

    Spawned, since a process that has used CUDA cannot fork. It leads a session of its own, so that Ctrl-C reaches the
    parent alone, which then ends the child and whatever compiler the child has started.

    Args:
        serve: importable by name.
        log: file that what the child prints is appended to. Default: where the parent's goes.

    Raises:
        EnvironmentProblemError: no process can be started.
    """

    def __init__(self, serve: Serve, *, log: Path | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(serve, theirs, log), daemon=True)
        try:
            self._process.start()
        except OSError as error:
            self.connection.close()
            raise EnvironmentProblemError(
                describe(
                    "process",
                    value=error,
                    limit="this user must be able to start one more",
                    remedy="Raise the limit of processes or memory, of `ulimit` or of the container.",
                )
            ) from error
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
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
        if self.connection.closed:
            return  # Its number may be another's by now.
        # Its session, if it has come so far: a compiler would outlive it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(KILL_S)
        self.connection.close()

    def _death(self) -> str:
        ended = wait([self._process.sentinel], 5)  # Its pipe ended; it may still be on its way out.
        self.kill()  # Before anything asks for its code: until then nobody else can have its number.
        code = self._process.exitcode
        if not ended or code is None:
            return "closed its pipe and did not end; killed"
        if code >= 0:
            return f"exited with code {code}"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"


def _run(serve: Serve, connection: Connection, log: Path | None) -> None:
    os.setsid()
    if log is not None:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    # Without its parent a child has nothing to do.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(connection)
