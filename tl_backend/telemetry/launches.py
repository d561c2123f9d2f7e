"""How often each kernel was launched in this process, by which row of a table, and the file that says so.

The count is the proof that a request ran on these kernels and not on another backend's. Kernels: "prefill",
"prefill_hopper", "prefill_combine", "decode", "decode_combine", "cache_write", "merge".
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections import Counter
from pathlib import Path

from tl_backend.settings import Settings

INTERVAL_S = 1.0

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM formats and shows only loggers below its own.

_launches: Counter[tuple[str, str]] = Counter()  # By kernel and source.
_events: Counter[tuple[str, str]] = Counter()
_lock = threading.Lock()
_writing_pid: int | None = None
_follows_forks = False


def record(kernel: str, source: str = "") -> None:
    """Count one launch of ``kernel``. One dict update, no lock: a vLLM worker launches from one thread.

    Args:
        kernel: its kind.
        source: where its config comes from, as a plan says it; empty for kernels that no table is about.
    """
    _launches[kernel, source] += 1


def record_event(event: str, what: str) -> None:
    """Count what is worth a number and is no launch: a look-up that missed, a table that is not used."""
    _events[event, what] += 1


def counts() -> dict[str, int]:
    """Launches of this process so far, by kernel."""
    by_kernel: dict[str, int] = {}
    for (kernel, _), launches in _copy(_launches).items():
        by_kernel[kernel] = by_kernel.get(kernel, 0) + launches
    return by_kernel


def rows() -> dict[str, dict[str, int]]:
    """Launches so far by kernel and by what chose their config: a table's row, or the family default."""
    return _nested({key: launches for key, launches in _copy(_launches).items() if key[1]})


def events() -> dict[str, dict[str, int]]:
    """What ``record_event`` counted, by event."""
    return _nested(_copy(_events))


def _copy(counter: Counter[tuple[str, str]]) -> dict[tuple[str, str], int]:
    return dict(counter)  # In one step of the interpreter: the snapshot's thread reads while a worker counts.


def _nested(flat: dict[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for (outer, inner), count in flat.items():
        nested.setdefault(outer, {})[inner] = count
    return nested


def start_snapshots(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Write the counts to ``folder/launches-<pid>.json`` now, every second and at exit, from a daemon thread.

    The file holds ``{"pid": int, "kernels": counts(), "rows": rows(), "events": events(), "time": seconds since the
    epoch}``. It is replaced as a whole: a reader never sees half of it. Calling again in the same process does nothing.
    A fork of the process writes its own file, of its own launches: vLLM forks engine cores, and loads no plugin in them
    again.

    Args:
        folder: where to write; made if missing. Default ``TL_BACKEND_LAUNCH_LOG_DIR``; without it nothing is written.

    Returns:
        The file's path, or None where nothing is written.

    Raises:
        InvalidInputError: a ``TL_BACKEND_*`` variable is malformed.
    """
    global _writing_pid, _follows_forks
    target = Settings.from_env().launch_log_dir if folder is None else folder
    if target is None:
        return None
    path = Path(target) / f"launches-{os.getpid()}.json"
    with _lock:
        if _writing_pid == os.getpid():  # A fork inherits the variable but not the thread.
            return path
        _writing_pid = os.getpid()
    if not _follows_forks:
        _follows_forks = True
        os.register_at_fork(after_in_child=lambda: _start_in_fork(target))
    threading.Thread(target=_write_forever, args=(path,), name="tl-backend-launches", daemon=True).start()
    atexit.register(_write_or_log, path)
    return path


def _start_in_fork(folder: str | os.PathLike[str]) -> None:
    global _lock
    _lock = threading.Lock()  # The parent's may have been held.
    _launches.clear()
    _events.clear()
    atexit.unregister(_write_or_log)  # It would write to the parent's file.
    start_snapshots(folder)


def _write_forever(path: Path) -> None:
    while _write_or_log(path):
        time.sleep(INTERVAL_S)


def _write_or_log(path: Path) -> bool:
    """One snapshot. A folder that cannot be written costs one log line, never the server."""
    try:
        with _lock:  # The last snapshot of a process has the last word.
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{threading.get_ident()}.partial")
            snapshot = {"pid": os.getpid(), "kernels": counts(), "rows": rows(), "events": events()}
            partial.write_text(json.dumps({**snapshot, "time": time.time()}))
            partial.replace(path)
    except OSError as error:
        logger.warning("launch counts are not written: %s", error)
        return False
    return True
