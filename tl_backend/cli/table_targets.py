"""Which table a command means: a file, or a device with or without a generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tl_backend.cli.options import device_of
from tl_backend.configs.generations import (
    active_generation,
    device_folder,
    device_folders,
    generation_path,
    generations,
    read_active,
    read_shipped,
)
from tl_backend.configs.identity import BY_NAME, KNOWN, DeviceIdentity, device_identity
from tl_backend.configs.table import Table, read_table
from tl_backend.errors import InvalidInputError, TableError, describe
from tl_backend.settings import Settings

SHIPPED = "shipped"
TARGET = (
    "A file, or [DEVICE][@GENERATION|@shipped]. Without a device, this machine's; without a generation, what serves it."
)
TargetArgument = Annotated[str, typer.Argument(metavar="[TARGET]", help=TARGET)]
DeviceNameOption = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="As `table list` names it. Default: this machine's.")
]


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A table of the list.

    Attributes:
        target: the word for it.
        active: whether it serves its device: a user's promoted one, or a shipped one without such.
        table: None where the file is bad.
        problem: why it is.
    """

    target: str
    active: bool
    table: Table | None
    problem: str | None


def user_folder() -> Path | None:
    """Where the user's tables are."""
    return Settings.from_env().table_dir


def device_named(name: str) -> DeviceIdentity:
    """The device of a name; this machine's for an empty one.

    Raises:
        InvalidInputError: no device is called so.
    """
    for known in (name, f"nvidia_{name}", f"amd_{name}"):
        if known in BY_NAME:
            return BY_NAME[known]
    here = device_identity(device_of())
    if name not in ("", here.name):
        limit = f"this machine's is {here.name}; others are {', '.join(BY_NAME)}"
        raise InvalidInputError(describe("device", value=name, limit=limit, remedy="Pass one of them."))
    return here


def table_of(target: str) -> Table:
    """The table that a word means.

    Raises:
        InvalidInputError: there is no such table.
        TableError: its file is bad.
    """
    if target.endswith(".json") or "/" in target:
        return read_table(Path(target))
    name, _, which = target.partition("@")
    device, folder = device_named(name), user_folder()
    if which == SHIPPED:
        found = read_shipped(device)
    elif which:
        found = _generation(device, which, folder)
    else:
        found = (None if folder is None else read_active(folder, device)) or read_shipped(device)
    if found is None:
        raise InvalidInputError(
            describe(
                f"table {target!r}" if target else "table of this machine",
                value=f"none of {device.name}",
                limit="a shipped table, or one of the user's that was promoted, is needed",
                remedy="See `tl-backend table list`; `tl-backend tune` writes one.",
            )
        )
    return found


def listed() -> list[Listed]:
    """Every table of the user's and every shipped one.

    Raises:
        TableError: the user's folder cannot be read.
    """
    folder = user_folder()
    folders = [] if folder is None else device_folders(folder)
    found = [table for path in folders for table in _generations(path)]
    served = {table.target.partition("@")[0] for table in found if table.active}
    for device in KNOWN:
        table = _listed(f"{device.name}@{SHIPPED}", device.name not in served, partial(read_shipped, device))
        found += [table] if table.table or table.problem else []
    return found


def _generations(folder: Path) -> list[Listed]:
    """The generations in a device's folder."""
    try:
        active, numbers = active_generation(folder), generations(folder)
    except TableError as error:
        return [Listed(target=folder.name, active=False, table=None, problem=str(error))]
    missing = [] if active is None or active in numbers else [active]
    device = BY_NAME.get(folder.name)
    return [
        _listed(
            f"{folder.name}@{number}",
            number == active,
            partial(read_table, generation_path(folder, number), device=device),
        )
        for number in [*numbers, *missing]
    ]


def _listed(target: str, active: bool, read: Callable[[], Table | None]) -> Listed:
    try:
        return Listed(target=target, active=active, table=read(), problem=None)
    except TableError as error:
        return Listed(target=target, active=active, table=None, problem=str(error))


def _generation(device: DeviceIdentity, which: str, folder: Path | None) -> Table | None:
    if not which.isdecimal():
        limit = f"a number or {SHIPPED!r} after @"
        raise InvalidInputError(describe("generation", value=repr(which), limit=limit, remedy="See `table list`."))
    if folder is None or int(which) not in generations(device_folder(folder, device)):
        return None
    return read_table(generation_path(device_folder(folder, device), int(which)), device=device)
