"""What the demo reads from a server's launch files (``tl_backend.telemetry.launches``), and what they must show."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

from tl_backend.errors import TLBackendError

# Kernels of which exactly one runs in a layer at a step that has one request; prefills of either family.
PREFILLS, DECODES = ("prefill", "prefill_hopper"), ("decode",)
SNAPSHOT_SECONDS = 10.0
POLL_SECONDS = 0.1


class LaunchCheckError(TLBackendError, AssertionError):
    """The kernels were not launched as often as the request needs."""


def read_counts(folder: Path, *, after: float = 0.0, timeout: float = SNAPSHOT_SECONDS) -> dict[str, int]:
    """Launches by kernel, summed over the processes of a server on this machine.

    Each process replaces its file every second, so a count is complete once its file is younger than the last launch. A
    process that has ended left its last count.

    Args:
        folder: the server's ``TL_BACKEND_LAUNCH_LOG_DIR``.
        after: seconds since the epoch; waits until every running process has written later than that.
        timeout: seconds to wait for it.

    Raises:
        LaunchCheckError: no process wrote a file, or one stopped to write.
    """
    deadline = time.monotonic() + timeout
    while True:
        snapshots = [json.loads(path.read_text()) for path in folder.glob("launches-*.json")]
        stale = [s["pid"] for s in snapshots if s["time"] <= after and _is_running(s["pid"])]
        if snapshots and not stale:
            return dict(sum((Counter(snapshot["kernels"]) for snapshot in snapshots), Counter()))
        if time.monotonic() > deadline:
            raise LaunchCheckError(
                f"launch counts: got {len(snapshots)} files in {folder}, {len(stale)} of them stale; every process "
                "that loads the plugin writes one a second. See the server's log for why it did not."
            )
        time.sleep(POLL_SECONDS)


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """Launches between two readings, without the kernels that were not launched."""
    return {kernel: n for kernel in sorted(after) if (n := after[kernel] - before.get(kernel, 0))}


def check_counts(counts: dict[str, int], *, num_layers: int, num_tokens: int) -> None:
    """Check that every layer of every step ran on the kernels, for one request of ``num_tokens`` generated tokens.

    The first token takes at least one prefill step, each further one a decode step; vLLM may prefill in chunks and may
    run a step ahead of the last token, never fewer steps.

    Raises:
        LaunchCheckError: a layer of a step ran elsewhere, or nothing ran.
    """
    prefill, decode = (sum(counts.get(kernel, 0) for kernel in kernels) for kernels in (PREFILLS, DECODES))
    writes = counts.get("cache_write", 0)
    floor = num_layers * num_tokens
    problems = [
        f"{name}: got {value} launches; {limit}"
        for name, value, holds, limit in (
            ("prefill", prefill, prefill >= num_layers, f"{num_layers} layers need at least {num_layers}"),
            ("decode", decode, decode >= floor - num_layers, f"{num_layers} layers x {num_tokens - 1} steps need more"),
            ("prefill", prefill, prefill % num_layers == 0, f"a multiple of {num_layers} layers is needed"),
            ("decode", decode, decode % num_layers == 0, f"a multiple of {num_layers} layers is needed"),
            ("cache_write", writes, writes >= floor, f"{num_layers} layers x {num_tokens} steps need more"),
        )
        if not holds
    ]
    if problems:
        raise LaunchCheckError("Not every layer ran on TileLang. " + ". ".join(problems) + ".")


def _is_running(pid: int) -> bool:
    try:
        # "pid (name) state ...": Z and X are processes that have ended.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
