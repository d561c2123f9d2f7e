"""The file format of a frozen table: its schema, and how it is read, checked and written."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import math
import os
import stat
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from tl_backend.configs.identity import DeviceIdentity, is_canonical
from tl_backend.configs.rows import Row, Settled, Strict
from tl_backend.errors import TableError, describe

SCHEMA_VERSION = 1
# The whole list of models has 1712 rows of 1.1 KiB; this is four times as much.
MAX_TABLE_BYTES = 8 << 20
REMEDY = "Write it with `tl-backend tune`, or take another with `tl-backend table rollback`."


class Toolchain(Strict):
    """Versions that the kernels were compiled with; of "cuda" and "hip" at most one is there."""

    tilelang: str
    torch: str
    cuda: str | None = None
    hip: str | None = None


class Provenance(Strict):
    """Who wrote a table: the day, the GPU as its driver prints it, the driver, this package's version and commit."""

    date: dt.date
    gpu: str
    driver: str
    tool_version: str
    commit: str | None = None


class Table(Strict):
    """Frozen choices for one kind of device. Made with ``Table.make``, which seals it with its hash.

    Attributes:
        device: whose table it is.
        generation: counts a user's tables of a device from 1; 0 for one that was not stored, as those shipped.
        content_hash: sha256 of all the rest, in hexadecimal.
        rows: numbered from 1 in messages.
        settled: where the default was found to be the best: no row, and no miss either.
    """

    schema_version: Literal[1] = 1
    device: DeviceIdentity
    toolchain: Toolchain
    provenance: Provenance
    generation: Annotated[int, Field(ge=0)]
    content_hash: str
    rows: tuple[Row, ...]
    settled: tuple[Settled, ...] = ()

    @classmethod
    def make(
        cls,
        *,
        device: DeviceIdentity,
        toolchain: Toolchain,
        provenance: Provenance,
        rows: tuple[Row, ...],
        settled: tuple[Settled, ...] = (),
        generation: int = 0,
    ) -> Table:
        """A table with its hash.

        Raises:
            pydantic.ValidationError: a row stands twice, or the device's name is not its own.
        """
        unsealed = cls(
            device=device,
            toolchain=toolchain,
            provenance=provenance,
            generation=generation,
            content_hash="",
            rows=rows,
            settled=settled,
        )
        return unsealed.model_copy(update={"content_hash": document_hash(unsealed.model_dump(mode="json"))})

    def with_generation(self, generation: int) -> Table:
        """The same table as another generation, with the hash of that."""
        fields = {name: getattr(self, name) for name in ("device", "toolchain", "provenance", "rows", "settled")}
        return Table.make(**fields, generation=generation)

    @property
    def label(self) -> str:
        """For people: "nvidia_h200 generation 3 (1a2b3c4d)"."""
        generation = f" generation {self.generation}" if self.generation else ""
        return f"{self.device.name}{generation} ({self.content_hash[:8]})"

    @model_validator(mode="after")
    def _is_consistent(self) -> Table:
        if not is_canonical(self.device):
            raise ValueError(f"{self.device} is what no device is called")
        seen = set()
        for entry in (*self.rows, *self.settled):
            if (entry.problem, entry.regime) in seen:
                raise ValueError(f"two entries for {entry.problem}, {entry.regime}")
            seen.add((entry.problem, entry.regime))
        return self


def dump_table(table: Table) -> bytes:
    """The table as a file's content."""
    document = table.model_dump(mode="json")
    document["content_hash"] = document_hash(document)
    return json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"


def parse_table(data: bytes, source: str, *, device: DeviceIdentity | None = None) -> Table:
    """The table in a file's content.

    Args:
        data: the content.
        source: the file's name, for messages.
        device: whose table it has to be; None takes any.

    Raises:
        TableError: it is malformed, or another device's.
    """
    if len(data) > MAX_TABLE_BYTES:
        raise _error(source, f"{len(data)} bytes", f"{MAX_TABLE_BYTES} bytes at most")
    document = _json(data, source)
    version = document.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:  # True and 1.0 equal 1.
        raise _error(source, f"schema_version {_short(version)}", f"this version of tl-backend reads {SCHEMA_VERSION}")
    try:
        table = Table.model_validate_json(data)
    except ValidationError as error:
        raise _error(source, *_first(error)) from None
    if table.content_hash != (content_hash := document_hash(document)):
        limit = f"its content has {content_hash}: it was changed after it was written"
        raise _error(source, f"content_hash {_short(table.content_hash)}", limit)
    if device is not None and table.device != device:
        raise _error(source, f"a table of {table.device}", f"this device is {device}")
    return table


def read_table(path: Path, *, device: DeviceIdentity | None = None) -> Table:
    """The table in a file.

    Raises:
        TableError: it cannot be read, is no regular file, is malformed, or another device's.
    """
    return parse_table(read_small_file(path, MAX_TABLE_BYTES), str(path), device=device)


def read_small_file(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file.

    Raises:
        TableError: it cannot be read, is no regular file, or larger than that.
    """
    try:
        # Without O_NONBLOCK the opening of a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _error(str(path), stat.filemode(status.st_mode), "a regular file is needed")
            if status.st_size > max_bytes:
                raise _error(str(path), f"{status.st_size} bytes", f"{max_bytes} bytes at most")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read(max_bytes + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _error(str(path), error.strerror or error, "it has to be a file that can be read") from None


def _json(data: bytes, source: str) -> dict[str, Any]:
    if data.startswith(b"\xef\xbb\xbf"):
        raise _error(source, "a byte-order mark", "UTF-8 without one is needed")
    try:
        document = json.loads(data.decode(), object_pairs_hook=_distinct, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise _error(source, "deeply nested brackets", "a table has six levels") from None
    except ValueError as error:  # Also what the hooks raise, and bytes that are not UTF-8.
        value = "no content" if not data.strip() else f"no JSON: {_short(str(error))}"
        raise _error(source, value, "one JSON object is needed") from None
    if not isinstance(document, dict):
        raise _error(source, f"a JSON {type(document).__name__}", "one JSON object is needed")
    return document


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} twice in one object")
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name}, which JSON does not have")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):  # 1e999, which no hash can be made of.
        raise ValueError(f"{_short(digits)}, which no float64 holds")
    return value


def _first(error: ValidationError) -> tuple[str, str]:
    """Value and limit of a message: the first of the errors, and how many more there are."""
    first = error.errors(include_url=False)[0]
    place = list(first["loc"])
    if len(place) > 1 and place[0] in ("rows", "settled"):  # As messages number them.
        place[:2] = [f"{place[0]}[{int(place[1]) + 1}]"]
    value = ".".join(map(str, place)) or "a table"
    if isinstance(first["input"], str | int | float | None):
        value = f"{value} = {_short(first['input'])}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return value, first["msg"].removeprefix("Value error, ").removesuffix(".") + more


def document_hash(document: dict[str, Any]) -> str:
    """Of a document as it stands, so that a field that later versions add does not change an old file's hash."""
    rest = {name: value for name, value in document.items() if name != "content_hash"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def _error(source: str, value: object, limit: str) -> TableError:
    return TableError(describe(f"table {source}", value=value, limit=limit, remedy=REMEDY))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
