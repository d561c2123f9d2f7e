"""The server's life and its errors, with a stand-in for vLLM."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tl_backend.testing.server import ServerError, VllmServer


@pytest.fixture
def start(fake_vllm: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    return lambda **options: VllmServer("model", log_path=tmp_path / "log", **options)


def facts(server: VllmServer) -> dict[str, Any]:
    """The command line and the environment that the stand-in saw."""
    seen: dict[str, Any] = json.loads(server.log_path.read_text().splitlines()[0])
    return seen


def is_running(pid: int) -> bool:
    """Whether a process lives; one that has ended but was not collected yet does not."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def child_of(server: VllmServer) -> int:
    return int(server.log_path.read_text().split("child ")[1].split()[0])


def wait_for(condition: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_serves_and_ends_with_all_its_processes(start: Any) -> None:
    waits: list[float] = []
    with start(backend="tilelang", args=["--dtype", "float32"]) as server:
        assert server.wait_healthy(on_progress=waits.append, timeout=60) >= 0
        assert server.get("/metrics") == "fine"
        assert server.complete("prompt", max_tokens=2)["choices"][0]["text"] == "hi"
        assert [chunk["choices"][0]["token_ids"] for chunk in server.stream("prompt")] == [[104], [105]]
        child = child_of(server)
        assert is_running(child)
        arguments, env = facts(server)["arguments"], facts(server)["env"]
        assert Path(env["TMPDIR"]).is_dir()
    assert waits[0] < 1
    assert arguments[:2] == ["serve", "model"]
    assert arguments[2:] == [
        "--host", "127.0.0.1", "--port", str(server.port), "--attention-backend", "tilelang", "--dtype", "float32",
    ]  # fmt: skip
    wait_for(lambda: not is_running(child) and not is_running(server.pid))
    assert not Path(env["TMPDIR"]).exists()
    server.stop()


def test_passes_on_no_settings_but_its_own(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TL_BACKEND_CPU", "1")
    monkeypatch.setenv("OTHER", "kept")
    with start(env={"TL_BACKEND_LAUNCH_LOG_DIR": "/nowhere"}) as server:
        wait_for(lambda: "child" in server.log_path.read_text())
        seen = facts(server)
    assert "--attention-backend" not in seen["arguments"]
    assert {name: value for name, value in seen["env"].items() if name.startswith("TL_BACKEND_")} == {
        "TL_BACKEND_LAUNCH_LOG_DIR": "/nowhere"
    }
    assert (seen["env"]["OTHER"], seen["env"]["HF_HUB_OFFLINE"]) == ("kept", "1")


def test_a_server_that_dies_is_quoted(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "dies")
    with start() as server, pytest.raises(ServerError, match="exit status 1 before it was ready") as caught:
        server.wait_healthy(timeout=60)
    assert "The first errors in its log:\n  RuntimeError: the root of it\n" in str(caught.value)


def test_a_server_that_hangs_is_given_up(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "hangs")
    with start() as server:
        with pytest.raises(ServerError, match="not ready after 1 s"):
            server.wait_healthy(timeout=1)
        wait_for(lambda: "child" in server.log_path.read_text())
        child = child_of(server)
    wait_for(lambda: not is_running(child))


def test_an_error_on_the_way_ends_the_server(start: Any) -> None:
    with pytest.raises(KeyboardInterrupt), start() as server:
        server.wait_healthy(timeout=60)
        raise KeyboardInterrupt
    assert not is_running(server.pid)


def test_a_refused_request_carries_the_answer(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "refuses")
    with start() as server:
        server.wait_healthy(timeout=60)
        with pytest.raises(ServerError, match="/v1/completions answered 400: no such model"):
            server.complete("prompt")


def test_a_broken_stream_raises(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "breaks off")
    with start() as server:
        server.wait_healthy(timeout=60)
        chunks = server.stream("prompt")
        assert next(chunks)["choices"][0]["text"] == "h"
        with pytest.raises(ServerError, match="engine died"):
            next(chunks)


def test_a_server_that_is_gone_cannot_be_reached(start: Any) -> None:
    server = start()
    server.stop()
    with pytest.raises(ServerError, match="cannot be reached"):
        server.get("/metrics")


def test_the_system_proxy_is_not_asked(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with start() as server:
        server.wait_healthy(timeout=60)


def test_pids_are_no_descendants_of_the_callers_group(start: Any) -> None:
    with start() as server:
        assert os.getpgid(server.pid) == server.pid != os.getpgid(0)
