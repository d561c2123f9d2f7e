"""The writing side of a user's tables: generations of a device, and which one is active.

Writers take turns by a lock that ends with its process, and what they write is whole or not there: a reader needs no
lock, and a writer that is killed leaves at most a file that the next one removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from tl_backend.configs.generations import (
    ACTIVE,
    MAX_HISTORY,
    device_folder,
    generation_path,
    generations,
    history,
)
from tl_backend.configs.identity import DeviceIdentity
from tl_backend.configs.table import Table, dump_table, read_table
from tl_backend.errors import EnvironmentProblemError, InvalidInputError, TableError, describe

LOCK = ".lock"
PARTIAL = ".partial"


class Store:
    """A user's folder of tables.

    Args:
        folder: ``Settings.table_dir``; made at the first write.

    Raises:
        EnvironmentProblemError: there is none.
    """

    def __init__(self, folder: Path | None) -> None:
        if folder is None:
            raise EnvironmentProblemError(
                describe(
                    "folder of tables",
                    value="none: this user has no home",
                    limit="a folder that can be written is needed",
                    remedy="Set TL_BACKEND_TABLE_DIR to one.",
                )
            )
        self.folder = folder

    def write_generation(self, table: Table) -> int:
        """Keep a table as the next generation of its device. It is not active until it is promoted.

        Returns:
            The generation's number.

        Raises:
            EnvironmentProblemError: the folder cannot be written.
        """
        folder = device_folder(self.folder, table.device)
        with _locked(folder):
            generation = max([0, *generations(folder), *_promoted(folder)]) + 1
            _replace(generation_path(folder, generation), dump_table(table.with_generation(generation)))
        return generation

    def promote(self, device: DeviceIdentity, generation: int) -> Table:
        """Make a generation the active one; processes that start from now on read it.

        Raises:
            InvalidInputError: there is no such generation.
            TableError: its file is malformed or another device's.
            EnvironmentProblemError: the folder cannot be written.
        """
        folder = device_folder(self.folder, device)
        there = generations(folder)
        if generation not in there:
            raise InvalidInputError(
                describe(
                    f"generation of {device.name}",
                    value=generation,
                    limit=f"{folder} has {', '.join(map(str, there)) or 'none'}",
                    remedy="See `tl-backend table list`.",
                )
            )
        table = read_table(generation_path(folder, generation), device=device)
        with _locked(folder):
            promoted = _promoted(folder)
            if promoted[-1:] != [generation]:
                _write_history(folder, [*promoted, generation])
        return table

    def rollback(self, device: DeviceIdentity) -> int | None:
        """Undo the last promotion.

        Returns:
            The generation that is active now, or None: the shipped table serves.

        Raises:
            InvalidInputError: no generation is active.
            TableError: the file that says which one is active is malformed.
            EnvironmentProblemError: the folder cannot be written.
        """
        folder = device_folder(self.folder, device)
        if not history(folder):
            raise InvalidInputError(
                describe(
                    f"rollback of {device.name}",
                    value="no active generation",
                    limit=f"one in {folder} is needed",
                    remedy="Promote one with `tl-backend table promote`.",
                )
            )
        with _locked(folder):
            left = history(folder)[:-1]
            _write_history(folder, left)
        return left[-1] if left else None


def write_table(path: Path, table: Table) -> None:
    """Write a table to a file of one's own, as a whole.

    Raises:
        EnvironmentProblemError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, dump_table(table))
    except OSError as error:
        raise EnvironmentProblemError(
            describe(
                f"table {path}",
                value=error.strerror or error,
                limit="it has to be a file that can be written",
                remedy="Name another file.",
            )
        ) from error


def make_folder(folder: Path) -> Path:
    """A folder among the tables, made if it is missing.

    Raises:
        EnvironmentProblemError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def _promoted(folder: Path) -> list[int]:
    """As ``history``; a malformed file, which the next promotion replaces, counts as none."""
    with contextlib.suppress(TableError):
        return history(folder)
    return []


def _write_history(folder: Path, promoted: list[int]) -> None:
    _replace(folder / ACTIVE, "".join(f"{generation}\n" for generation in promoted[-MAX_HISTORY:]).encode())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The only writer in a device's folder, which is made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for leftover in folder.glob(f"*{PARTIAL}"):  # Of a writer that was killed: nobody else holds the lock.
                leftover.unlink(missing_ok=True)
            yield
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> EnvironmentProblemError:
    return EnvironmentProblemError(
        describe(
            f"folder of tables {folder}",
            value=error.strerror or error,
            limit="it has to be a folder that can be written and locked",
            remedy="Set TL_BACKEND_TABLE_DIR to one.",
        )
    )


def _replace(path: Path, content: bytes) -> None:
    """Write a file as a whole, and wait until the disk has it."""
    # A name of its own: files that are no generation have no lock.
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:  # A full disk needs no half of a table.
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
