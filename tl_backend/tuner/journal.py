"""What a search has found so far, one JSON line an outcome, on disk before the next begins."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tl_backend.configs.choice import Config
from tl_backend.errors import EnvironmentProblemError, InvalidInputError, describe

VERSION = 1


def config_key(config: Config) -> str:
    """The fields of a config as one string."""
    return json.dumps(dataclasses.asdict(config), sort_keys=True)


def journal_path(folder: Path, identity: Mapping[str, Any]) -> Path:
    """Where the journal of a search lies: one file for all that a result depends on."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return folder / "work" / f"{identity['device']['name']}-{digest}.jsonl"


class Journal:
    """An append-only file. A last line that was cut off is dropped; so is a file that begins with another identity.

    Args:
        path: made if missing, with its folder.
        identity: problem, device, versions: what results depend on.
        fresh: forget what is there.

    Raises:
        InvalidInputError: another search writes it.
        EnvironmentProblemError: it cannot be written.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.path = path
        header = {"event": "search", "version": VERSION, **json.loads(json.dumps(identity))}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._file.close()
                raise InvalidInputError(
                    describe(
                        "journal",
                        value=f"{path} is in use",
                        limit="one search of a problem at a time: two would disturb each other's times",
                        remedy="Wait for the other search, or end it.",
                    )
                ) from None
            self._lines = [] if fresh else self._read()
            if self._lines[:1] != [header]:
                self._lines = []
                self._file.truncate(0)
                self._append(header)
        except OSError as error:
            raise self._unwritable(error) from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def events(self, event: str) -> Iterator[dict[str, Any]]:
        """The outcomes of one kind so far, in order."""
        return (line for line in self._lines if line["event"] == event)

    def add(self, event: str, **fields: Any) -> None:
        """Append an outcome; returns when it is on disk.

        Raises:
            EnvironmentProblemError: it cannot be written.
        """
        self._append({"event": event, **fields})

    def _unwritable(self, error: OSError) -> EnvironmentProblemError:
        return EnvironmentProblemError(
            describe(
                "journal",
                value=error,
                limit=f"{self.path} must be writable, with room for what is found",
                remedy="Set TL_BACKEND_TABLE_DIR to a folder that is.",
            )
        )

    def _append(self, line: dict[str, Any]) -> None:
        left = memoryview(json.dumps(line).encode() + b"\n")
        try:
            while left:  # Without a buffer, which would be written again when the file is closed.
                left = left[os.write(self._file.fileno(), left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error
        self._lines.append(line)

    def _read(self) -> list[dict[str, Any]]:
        self._file.seek(0)
        lines, end = [], 0
        for raw in self._file:
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError):
                break
            if not raw.endswith(b"\n") or not isinstance(line, dict) or "event" not in line:
                break
            lines.append(line)
            end += len(raw)
        self._file.truncate(end)
        return lines
