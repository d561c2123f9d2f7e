"""A ``vllm serve`` process on loopback that ends with its owner."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tl_backend.errors import EnvironmentProblemError

if TYPE_CHECKING:
    from typing_extensions import Self

HOST = "127.0.0.1"
LOG_TAIL_LINES = 15
NUM_CAUSES = 3
# The last line of a traceback, with or without the prefix of vLLM's log.
_CAUSE = re.compile(r"^(?:\([^)]*\) ERROR \S+ \S+ \[[^]]*\] )?((?:\w+\.)*\w*(?:Error|Exception)\b:? .*)$", re.MULTILINE)
# How long the server may take to end by itself, then its children, then what cleans up after them.
STOP_SECONDS, CHILDREN_SECONDS, CLEANUP_SECONDS = 5.0, 2.0, 2.0
POLL_SECONDS = 0.25
# Nothing here may leave the machine: no hub, no usage report, and engine processes that meet on loopback.
QUIET_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_HOST_IP": HOST}
# A system proxy has no business with loopback.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(EnvironmentProblemError):
    """The server did not start, died, or refused a request; the message quotes its log."""


class VllmServer:
    """One ``vllm serve`` with this interpreter, in a process group of its own.

    Starts in the constructor; use it as a context manager, or call ``stop``.

    Args:
        model: a model folder.
        backend: the value of ``--attention-backend``, or None for vLLM's own choice.
        env: variables added to the caller's environment, from which every ``TL_BACKEND_*`` is taken away first: what
            this server is told is what stands here.
        args: further arguments of ``vllm serve``.
        log_path: file that takes the server's output.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        backend: str | None = None,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        log_path: str | Path,
    ) -> None:
        self.model = str(model)
        self.log_path = Path(log_path)
        self.port = _free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.command = [sys.executable, "-m", "tl_backend.testing.vllm_cli", "serve", self.model]
        self.command += ["--host", HOST, "--port", str(self.port)]
        if backend is not None:
            self.command += ["--attention-backend", backend]
        self.command += args
        self._stopped = False
        # vLLM's sockets; their paths may have 107 bytes, so that a folder of the caller's may be too deep.
        self._tmp = tempfile.mkdtemp(prefix="tl-vllm-")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TL_BACKEND_")}
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env=inherited | QUIET_ENV | {"TMPDIR": self._tmp} | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Its own session: Ctrl-C reaches the owner alone, and stop() can end the whole group.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def wait_healthy(self, on_progress: Callable[[float], None] | None = None, timeout: float = 300.0) -> float:
        """Wait until /health answers 200.

        Args:
            on_progress: called with the seconds waited, about four times a second.
            timeout: seconds.

        Returns:
            The seconds waited.

        Raises:
            ServerError: the process ended, or the time is up.
        """
        started = time.monotonic()
        while True:
            waited = time.monotonic() - started
            if on_progress is not None:
                on_progress(waited)
            if (code := self._process.poll()) is not None:
                raise self._error(f"vllm serve ended with exit status {code} before it was ready")
            if self._healthy():
                return waited
            if waited > timeout:
                raise self._error(f"vllm serve was not ready after {timeout:.0f} s")
            time.sleep(POLL_SECONDS)

    def get(self, route: str, timeout: float = 10.0) -> str:
        """The body of ``GET route`` as text, for example ``/metrics``."""
        with self._open(route, None, timeout) as response:
            return str(response.read().decode())

    def complete(self, prompt: str | list[int], *, timeout: float = 300.0, **options: Any) -> dict[str, Any]:
        """The JSON answer of ``POST /v1/completions``; ``options`` are further fields of the request."""
        with self._open("/v1/completions", self._request(prompt, options), timeout) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def stream(self, prompt: str | list[int], *, timeout: float = 300.0, **options: Any) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed ``POST /v1/completions``, as they come."""
        with self._open("/v1/completions", self._request(prompt, {**options, "stream": True}), timeout) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                chunk: dict[str, Any] = json.loads(data)
                if "error" in chunk:
                    raise self._error(f"vllm serve broke off the stream: {chunk['error']}")
                yield chunk

    def stop(self) -> None:
        """End the server and all that it started; safe to call twice. An interrupt meanwhile ends it at once."""
        if self._stopped:
            return
        self._stopped = True
        try:
            if self._process.poll() is None:
                # vLLM's API server ends its engine on SIGTERM.
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_SECONDS)
            _wait_for_end(self.pid, CHILDREN_SECONDS)
        finally:
            # Python's resource trackers come last: they end by themselves, and free shared memory of those that died.
            for member, command in _group(self.pid).items():
                if b"resource_tracker" not in command:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(member, signal.SIGKILL)
            self._process.wait()
            _wait_for_end(self.pid, CLEANUP_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            shutil.rmtree(self._tmp, ignore_errors=True)

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of the server's output."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def _request(self, prompt: str | list[int], options: dict[str, Any]) -> bytes:
        return json.dumps({"model": self.model, "prompt": prompt, **options}).encode()

    def _open(self, route: str, body: bytes | None, timeout: float) -> Any:
        request = urllib.request.Request(self.url + route, data=body, headers={"Content-Type": "application/json"})
        try:
            return _opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read().decode(errors="replace")
            raise self._error(f"{route} answered {error.code}: {detail}") from error
        except OSError as error:
            raise self._error(f"{route} cannot be reached: {error}") from error

    def _healthy(self) -> bool:
        try:
            with _opener.open(self.url + "/health", timeout=5.0) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _error(self, message: str) -> ServerError:
        # The first exceptions tell more than the last: vLLM's parent processes only report that a child failed.
        causes = list(dict.fromkeys(_CAUSE.findall(self.log_path.read_text(errors="replace"))))[:NUM_CAUSES]
        quoted = "".join(f"\n  {cause}" for cause in causes)
        first = f" The first errors in its log:{quoted}\n" if causes else ""
        return ServerError(f"{message}.{first} The last lines of its log:\n{self.log_tail()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _group(pgid: int) -> dict[int, bytes]:
    """The running processes of a process group, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # "pid (name) state ppid pgrp ..."; Z and X are processes that have ended.
            state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) == pgid and state not in "ZX":
                found[int(folder.name)] = (folder / "cmdline").read_bytes()
    return found


def _wait_for_end(pgid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _group(pgid) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 5)
