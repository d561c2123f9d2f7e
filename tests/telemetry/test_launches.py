"""Launch counts and their file."""

import json
import os
import subprocess
import sys

import pytest

from tl_backend.errors import InvalidInputError
from tl_backend.telemetry import launches


def test_record_counts_each_kernel():
    before = launches.counts()
    launches.record("decode")
    launches.record("decode")
    launches.record("prefill")
    after = launches.counts()
    assert after["decode"] - before.get("decode", 0) == 2
    assert after["prefill"] - before.get("prefill", 0) == 1


def test_launches_of_all_rows_are_one_kernels():
    before, rows = launches.counts().get("decode", 0), launches.rows().get("decode", {})
    for source in ("a table row 1", "a table row 1", "family default", ""):
        launches.record("decode", source)
    after = launches.rows()["decode"]
    assert launches.counts()["decode"] - before == 4
    assert {source: n - rows.get(source, 0) for source, n in after.items() if n != rows.get(source, 0)} == {
        "a table row 1": 2,
        "family default": 1,
    }


def test_nothing_is_written_unless_asked(monkeypatch):
    monkeypatch.delenv("TL_BACKEND_LAUNCH_LOG_DIR", raising=False)
    assert launches.start_snapshots() is None


def test_a_malformed_variable_is_named(monkeypatch):
    monkeypatch.setenv("TL_BACKEND_LAUNCH_LOGDIR", "launches")
    with pytest.raises(InvalidInputError, match="TL_BACKEND_LAUNCH_LOGDIR"):
        launches.start_snapshots()


def run_child(code, folder):
    env = os.environ | {"TL_BACKEND_LAUNCH_LOG_DIR": str(folder)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)


def test_the_snapshot_of_a_process_holds_its_counts_at_exit(tmp_path):
    folder = tmp_path / "made" / "on demand"
    child = run_child(
        "import os, sys\n"
        "from tl_backend.telemetry import launches\n"
        "assert launches.start_snapshots() == launches.start_snapshots()\n"
        "for _ in range(3): launches.record('prefill', 'row 7')\n"
        "launches.record_event('misses', 'a problem: a regime')\n"
        "launches.record('cache_write')\n"
        "assert not {'torch', 'tilelang', 'vllm'} & set(sys.modules)\n"
        "print(os.getpid())",
        folder,
    )
    (file,) = folder.iterdir()  # And no partial file.
    snapshot = json.loads(file.read_text())
    assert file.name == f"launches-{int(child.stdout)}.json"
    assert snapshot["pid"] == int(child.stdout)
    assert snapshot["kernels"] == {"prefill": 3, "cache_write": 1}
    assert snapshot["rows"] == {"prefill": {"row 7": 3}}
    assert snapshot["events"] == {"misses": {"a problem: a regime": 1}}
    assert snapshot["time"] > 0


def test_a_folder_that_cannot_be_written_costs_log_lines_only(tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("")
    child = run_child(
        "from tl_backend.telemetry import launches\nlaunches.start_snapshots()\nprint('alive')", occupied / "folder"
    )
    assert child.stdout == "alive\n"
    assert "launch counts are not written" in child.stderr


def test_a_fork_writes_its_own_launches(tmp_path):
    """CASES.md B25: vLLM forks its engine core where nothing has touched CUDA; plugins are not loaded again there."""
    child = run_child(
        "import json, os\n"
        "from tl_backend.telemetry import launches\n"
        "path = launches.start_snapshots()\n"
        "launches.record('decode')\n"
        "launches.record_event('misses', \"parent\")\n"
        "if (pid := os.fork()) == 0:\n"
        "    launches.record('prefill')\n"
        "    raise SystemExit\n"
        "os.waitpid(pid, 0)\n"
        "assert not path.exists() or json.loads(path.read_text())['pid'] == os.getpid(), 'the fork wrote it'\n"
        "print(pid)",
        tmp_path,
    )
    snapshots = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    kernels = {snapshot["pid"]: snapshot["kernels"] for snapshot in snapshots}
    events = {snapshot["pid"]: snapshot["events"] for snapshot in snapshots}
    assert events[int(child.stdout)] == {}
    assert kernels.pop(int(child.stdout)) == {"prefill": 1}
    assert list(kernels.values()) == [{"decode": 1}]
