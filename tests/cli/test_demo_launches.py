"""What launch counts must show, and how they are read."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from tl_backend.cli.demo_launches import LaunchCheckError, check_counts, difference, read_counts

LAYERS, TOKENS = 4, 32
ENDED = 2**22 + 1  # above the largest pid that Linux gives
GOOD = {"prefill": 4, "decode": 4 * 31, "decode_combine": 0, "cache_write": 4 * 32}


def write(folder: Path, pid: int, kernels: dict[str, int], age: float = 0.0) -> None:
    content = {"pid": pid, "kernels": kernels, "time": time.time() - age}
    (folder / f"launches-{pid}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "counts",
    [
        GOOD,
        GOOD | {"prefill": 12, "cache_write": 4 * 34},  # three chunks
        GOOD | {"decode": 4 * 32, "cache_write": 4 * 33},  # a step ahead
        GOOD | {"decode_combine": 4 * 31},
        GOOD | {"prefill": 0, "prefill_hopper": 4, "prefill_combine": 4},  # on Hopper
    ],
)
def test_whole_counts_pass(counts: dict[str, int]) -> None:
    check_counts(counts, num_layers=LAYERS, num_tokens=TOKENS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill": 0}, "prefill: got 0 launches"),
        ({"prefill": 3}, "prefill: got 3 launches"),
        ({"prefill": 5}, "prefill: got 5 launches; a multiple of 4"),
        ({"decode": 93}, "decode: got 93 launches; 4 layers x 31 steps need more"),
        ({"decode": 126}, "decode: got 126 launches; a multiple of 4"),
        ({"cache_write": 124}, "cache_write: got 124 launches"),
    ],
)
def test_missing_launches_fail(change: dict[str, int], message: str) -> None:
    with pytest.raises(LaunchCheckError, match=message):
        check_counts(GOOD | change, num_layers=LAYERS, num_tokens=TOKENS)


def test_nothing_launched_fails() -> None:
    with pytest.raises(LaunchCheckError, match="Not every layer ran on TileLang"):
        check_counts({}, num_layers=LAYERS, num_tokens=TOKENS)


def test_difference_leaves_out_what_did_not_move() -> None:
    assert difference({"prefill": 8, "decode": 5, "cache_write": 3}, {"prefill": 4, "decode": 5}) == {
        "prefill": 4, "cache_write": 3,
    }  # fmt: skip


def test_processes_are_summed(tmp_path: Path) -> None:
    write(tmp_path, ENDED, {"prefill": 1})
    write(tmp_path, os.getpid(), {"prefill": 2, "decode": 3})
    assert read_counts(tmp_path) == {"prefill": 3, "decode": 3}


def test_a_stale_file_of_a_running_process_is_waited_for(tmp_path: Path) -> None:
    write(tmp_path, ENDED, {"prefill": 1}, age=100)
    write(tmp_path, os.getpid(), {"prefill": 1}, age=5)
    refresh = threading.Timer(0.3, write, (tmp_path, os.getpid(), {"prefill": 2}, -60))
    refresh.start()
    assert read_counts(tmp_path, after=time.time(), timeout=60) == {"prefill": 3}
    refresh.join()


def test_a_file_that_stays_stale_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, os.getpid(), {"prefill": 1}, age=100)
    with pytest.raises(LaunchCheckError, match=r"got 1 files in .*, 1 of them stale"):
        read_counts(tmp_path, after=time.time(), timeout=0.2)


def test_without_files_the_plugin_did_not_load(tmp_path: Path) -> None:
    with pytest.raises(LaunchCheckError, match="got 0 files"):
        read_counts(tmp_path, timeout=0.2)


def test_a_server_without_launches_counts_zero(tmp_path: Path) -> None:
    write(tmp_path, os.getpid(), {}, age=-60)
    assert read_counts(tmp_path, after=time.time(), timeout=0.2) == {}
