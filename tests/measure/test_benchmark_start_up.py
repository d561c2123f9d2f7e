"""What of ``benchmarks.start_up`` holds without a server: what it runs, and how it judges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import start_up
from tl_backend.testing.server import ServerError


def row(**changes: Any) -> dict[str, Any]:
    found = {"model": "tiny", "backend": "TILELANG", "caches": "warm", "ready_s": 30.0, "kernels_s": 0.1}
    return found | {"compiled": 0, "loaded": 5, "compiled_while_serving": 0} | changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"caches": "empty", "compiled": 5}, []),
        ({"compiled": 1}, ["tiny, TILELANG, warm: 1 compiled"]),
        ({"compiled_while_serving": 2}, ["tiny, TILELANG, warm: 2 compiled while serving"]),
        ({"error": "it died"}, ["tiny, TILELANG, warm: it died"]),
    ],
)
def test_what_must_not_be(changes: dict[str, Any], said: list[str]) -> None:
    assert start_up.faults([row(**changes)]) == said


def test_a_line_a_start() -> None:
    assert start_up.line(row()).endswith("30.0 s, kernels: 0 compiled, 5 loaded, 0.1 s; 0 compiled while serving")
    assert start_up.line(row(backend="FLASH_ATTN")).endswith("ready after   30.0 s")
    assert start_up.line(row(error="it died\nof this")).endswith("FAILED: it died")


def test_the_monitor_watches_unless_graphs_are_off() -> None:
    assert start_up.server_arguments(start_up.arguments([]))[-2:] == ["--jit-monitor-mode", "error"]
    eager = start_up.server_arguments(start_up.arguments(["--eager"]))
    assert "--enforce-eager" in eager
    assert "--jit-monitor-mode" not in eager
    assert eager[eager.index("--max-model-len") + 1] == "30016"


def test_a_start_that_fails_costs_itself_and_every_backend_has_its_own_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    caches = []

    def start(model: Path, backend: str, options: Any, folder: Path, cache: Path) -> dict[str, Any]:
        caches.append(cache.name)
        if backend == "FLASH_ATTN" and len(caches) == 1:
            raise ServerError("no port")
        return row(compiled=5 if len(caches) == 3 else 0)

    monkeypatch.setattr(start_up, "start", start)
    out = tmp_path / "found.json"
    assert start_up.main(["--device", "cpu", "--out", str(out)]) == 1
    assert caches == ["caches-tiny-FLASH_ATTN"] * 2 + ["caches-tiny-TILELANG"] * 2
    document = json.loads(out.read_text())
    assert [found.get("error") for found in document["rows"]] == ["no port", None, None, None]
    assert document["environment"]["gpu"] == "none"
    assert "no port" in capsys.readouterr().out


def test_counts_of_all_processes_are_added(tmp_path: Path) -> None:
    for pid, events in enumerate(({"compiled at start-up": 3}, {"from the kernel cache": 2}, {})):
        content = {"events": {"kernels": events} if events else {}}
        (tmp_path / f"launches-{pid}.json").write_text(json.dumps(content))
    assert start_up.kernels(tmp_path) == {"compiled": 3, "loaded": 2, "compiled_while_serving": 0}
