"""What commands print: tables for people or one JSON document on stdout; progress on stderr."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any

import typer
from rich.console import Console

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, and nothing else there.")]
PIPE_WIDTH = 100  # Columns where nobody can say how many there are.


def people() -> Console:
    """The console on stdout."""
    return _console(stderr=False)


def progress() -> Console:
    """The console on stderr, for progress and remarks: stdout stays what was asked for."""
    return _console(stderr=True)


def print_json(document: Any) -> None:
    """The document on stdout. Dataclasses become objects, paths strings, NaN and infinity null: JSON has neither."""
    typer.echo(json.dumps(plain(document), indent=1, allow_nan=False))


def plain(value: Any) -> Any:
    """A value in terms of JSON.

    Raises:
        TypeError: it holds what has no form there.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else PIPE_WIDTH)
