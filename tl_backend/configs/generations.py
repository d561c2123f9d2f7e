"""Where tables lie: those of a user, a folder a device with numbered generations, and those that are shipped.

<folder>/nvidia_h200/0001.json     a generation, never changed
<folder>/nvidia_h200/0002.json
<folder>/nvidia_h200/active        the generations that were promoted, one a line; the last one is active
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from tl_backend.configs.identity import DeviceIdentity
from tl_backend.configs.table import Table, parse_table, read_small_file, read_table
from tl_backend.errors import TableError, describe

ACTIVE = "active"
# Promotions that a rollback can undo, and the size of a file that holds as many.
MAX_HISTORY = 64
MAX_ACTIVE_BYTES = 4096


def device_folder(folder: Path, device: DeviceIdentity) -> Path:
    """A device's folder in the user's."""
    return folder / device.name


def generation_path(folder: Path, generation: int) -> Path:
    """A generation's file in a device's folder."""
    return folder / f"{generation:04d}.json"


def generations(folder: Path) -> list[int]:
    """The generations in a device's folder, in order; none where there is no such folder.

    Raises:
        TableError: the folder cannot be read.
    """
    names = [path.stem for path in _listed(folder) if path.suffix == ".json"]
    return sorted(int(name) for name in names if name.isdecimal() and f"{int(name):04d}" == name and int(name) > 0)


def device_folders(folder: Path) -> list[Path]:
    """The folders of devices in the user's, by name; none where there is no such folder.

    Raises:
        TableError: the folder cannot be read.
    """
    return sorted(path for path in _listed(folder) if path.is_dir()) if folder.is_dir() else []


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TableError(
            describe(
                f"folder of tables {folder}",
                value=error.strerror or error,
                limit="it has to be a folder that can be read",
                remedy="Set TL_BACKEND_TABLE_DIR to one.",
            )
        ) from None


def history(folder: Path) -> list[int]:
    """The promoted generations of a device's folder, the active one last; empty where the shipped table serves.

    Raises:
        TableError: the file that says so cannot be read or says something else.
    """
    path = folder / ACTIVE
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError:  # Reading says why.
        pass
    content = read_small_file(path, MAX_ACTIVE_BYTES)
    lines = content.split()
    if not all(line.isdigit() and 0 < int(line) < 10**9 for line in lines):
        raise TableError(
            describe(
                f"active generation in {path}",
                value=repr(content[:100]),
                limit="one positive number a line",
                remedy="Write it with `tl-backend table promote`.",
            )
        )
    return [int(line) for line in lines]


def active_generation(folder: Path) -> int | None:
    """The active generation of a device's folder, or None where the shipped table serves.

    Raises:
        TableError: as ``history``.
    """
    promoted = history(folder)
    return promoted[-1] if promoted else None


def read_active(folder: Path, device: DeviceIdentity) -> Table | None:
    """The active table of a device in the user's folder, or None.

    Raises:
        TableError: it cannot be read, is malformed, or another device's.
    """
    folder = device_folder(folder, device)
    generation = active_generation(folder)
    return None if generation is None else read_table(generation_path(folder, generation), device=device)


def read_shipped(device: DeviceIdentity) -> Table | None:
    """The table of a device that this package brings, or None.

    Raises:
        TableError: it cannot be read, is malformed, or another device's.
    """
    file = importlib.resources.files("tl_backend") / "tables" / f"{device.name}.json"
    if not file.is_file():
        return None
    try:
        data = file.read_bytes()
    except OSError as error:
        raise TableError(
            describe(
                f"table {file}",
                value=error.strerror or error,
                limit="it has to be a file that can be read",
                remedy="Install tl-backend so that this user can read it.",
            )
        ) from None
    return parse_table(data, str(file), device=device)
