"""How often each kernel was launched in this process, and the file that says so.

The count is the proof that a request ran on these kernels and not on another backend's. Kernels: "prefill", "decode",
"decode_combine", "cache_write".
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

_counts: Counter[str] = Counter()
_lock = threading.Lock()
_writing_pid: int | None = None
_follows_forks = False


def record(kernel: str) -> None:
    """Count one launch of ``kernel``. One dict update, no lock: a vLLM worker launches from one thread."""
    _counts[kernel] += 1


def counts() -> dict[str, int]:
    """Launches of this process so far, by kernel."""
    return dict(_counts)


def start_snapshots(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Write ``counts()`` to ``folder/launches-<pid>.json`` now, every second and at exit, from a daemon thread.

    The file holds ``{"pid": int, "kernels": {name: launches}, "time": seconds since the epoch}``. It is replaced as a
    whole: a reader never sees half of it. Calling again in the same process does nothing. A fork of the process writes
    its own file, of its own launches: vLLM forks engine cores, and loads no plugin in them again.

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
    _counts.clear()
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
            partial.write_text(json.dumps({"pid": os.getpid(), "kernels": counts(), "time": time.time()}))
            partial.replace(path)
    except OSError as error:
        logger.warning("launch counts are not written: %s", error)
        return False
    return True
