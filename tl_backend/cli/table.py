"""``tl-backend table``: look at tables, check them, and choose which generation of a user's serves."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table as Grid

from tl_backend.cli.output import JsonOption, people, print_json
from tl_backend.cli.table_targets import (
    TARGET,
    DeviceNameOption,
    TargetArgument,
    device_named,
    listed,
    table_of,
    user_folder,
)
from tl_backend.configs.generations import read_shipped
from tl_backend.configs.identity import DeviceIdentity, spec_of
from tl_backend.configs.lookup import row_refusal, settled_refusal
from tl_backend.configs.regime import PHASES, Regime
from tl_backend.configs.rows import Measured, Row, Settled
from tl_backend.configs.table import Table
from tl_backend.errors import TableError
from tl_backend.tuner.modelled import carried
from tl_backend.tuner.store import Store, write_table

FAMILY = "portable"  # What kernels are of where no other family is named.
NO = 1  # Exit code of an answer that is no.

table_app = typer.Typer(
    no_args_is_help=True, help="Frozen tables of tuned configs: look, check, choose.", rich_markup_mode=None
)


@table_app.command("list", epilog="Example: tl-backend table list --json")
def list_tables(json: JsonOption = False) -> None:
    """List your tables and the shipped ones, and which of them serve.

    A file of yours is TL_BACKEND_TABLE_DIR/DEVICE/GENERATION.json.
    """
    tables = listed()
    if json:
        print_json(
            [
                {"target": item.target, "active": item.active, "problem": item.problem} | _summary(item.table)
                for item in tables
            ]
        )
        return
    grid = Grid("table", "serves", "rows", "hash", "measured on", "TileLang")
    for item in tables:
        table = item.table
        if table is None:
            grid.add_row(escape(item.target), "bad", "", "", escape(str(item.problem)), "")
        else:
            where = f"{_source_words(table)}, {table.provenance.date}"
            words = (str(len(table.rows)), table.content_hash[:8], where, table.toolchain.tilelang)
            grid.add_row(escape(item.target), "yes" if item.active else "", *map(escape, words))
    people().print(grid if tables else f"No table, neither shipped nor in {user_folder()}.")


@table_app.command("show", epilog="Example: tl-backend table show nvidia_h200@3")
def show(target: TargetArgument = "", json: JsonOption = False) -> None:
    """Show the rows of a table.

    x default: how many times faster than the family's default, with its 95% interval. "modelled": not measured on this
    device. In a regime without a row the default serves.
    """
    table = table_of(target)
    if json:
        print_json(table.model_dump(mode="json"))
        return
    console = people()
    toolchain = ", ".join(f"{name} {version}" for name, version in table.toolchain.model_dump().items() if version)
    where = f"{_source_words(table)}, {table.provenance.date}; {toolchain}"
    console.print(f"{table.label}: {table.device}", where, sep="\n", markup=False)
    grids: dict[str, list[tuple[Any, tuple[str, ...]]]] = {}
    for number, row in enumerate(table.rows, start=1):
        words = (str(number), str(row.regime), _config_words(row), *_figure_words(row))
        grids.setdefault(str(row.problem), []).append((row.regime, words))
    for entry in table.settled:
        best = ("", str(entry.regime), "the default is the best", "1.00", f"{entry.us:.1f}")
        grids.setdefault(str(entry.problem), []).append((entry.regime, best))
    for problem, lines in grids.items():
        console.print(problem, style="bold", markup=False)
        grid = Grid("row", "regime", "config", "x default", "us")
        for _, line in sorted(lines, key=lambda line: _size(line[0])):
            grid.add_row(*map(escape, line))
        console.print(grid)


@table_app.command("diff", epilog="Example: tl-backend table diff @2 @3")
def diff(
    old: Annotated[str, typer.Argument(metavar="OLD", help=TARGET)],
    new: Annotated[str, typer.Argument(metavar="NEW", help=TARGET)],
    json: JsonOption = False,
) -> None:
    """Compare two tables.

    Exit code 1 if they differ in a device, toolchain, row or figure.
    """
    tables = table_of(old), table_of(new)
    heads = {
        name: [_plain(getattr(table, name)) for table in tables]
        for name in ("device", "toolchain")
        if getattr(tables[0], name) != getattr(tables[1], name)
    }
    before, after = map(_entries, tables)
    keys = [key for key in before | after if before.get(key) != after.get(key)]
    if json:
        rows = [
            {"problem": str(p), "regime": str(r), "old": _plain(before.get((p, r))), "new": _plain(after.get((p, r)))}
            for p, r in keys
        ]
        print_json({"equal": not keys and not heads, **heads, "entries": rows})
    else:
        console = people()
        for name, values in heads.items():
            console.print(f"{name}: {values[0]} -> {values[1]}")
        for problem in dict.fromkeys(problem for problem, _ in keys):
            console.print(str(problem), style="bold", markup=False)
            grid = Grid("regime", old, new)
            for key in sorted((key for key in keys if key[0] == problem), key=lambda key: _size(key[1])):
                grid.add_row(str(key[1]), _entry_words(before.get(key)), _entry_words(after.get(key)))
            console.print(grid)
        if not keys:
            console.print(f"The same {len(before)} entries.")
    if keys or heads:
        raise typer.Exit(NO)


@table_app.command("validate", epilog="Example: tl-backend table validate my_table.json nvidia_h200@shipped")
def validate(
    targets: Annotated[list[str] | None, typer.Argument(metavar="[TARGET]...", help=f"{TARGET} Default: all.")] = None,
    json: JsonOption = False,
) -> None:
    """Check that tables are well-formed.

    And that their devices can run all their rows. Exit code 1 if not.
    """
    found: dict[str, list[str]] = {}
    if targets:
        found = {target: _problems(partial(table_of, target)) for target in targets}
    else:
        found = {item.target: [item.problem] if item.problem else _row_problems(item.table) for item in listed()}
    if json:
        print_json(
            [{"target": target, "valid": not problems, "problems": problems} for target, problems in found.items()]
        )
    else:
        for target, problems in found.items():
            people().print(f"{target}: {'valid' if not problems else ''}", *problems, sep="\n  ", markup=False)
    if any(found.values()):
        raise typer.Exit(NO)


@table_app.command("promote", epilog="Example: tl-backend table promote 3")
def promote(
    generation: Annotated[int, typer.Argument(metavar="GENERATION", help="As `table list` has it after the @.", min=1)],
    device: DeviceNameOption = "",
    json: JsonOption = False,
) -> None:
    """Let a generation of your tables serve. Servers read it when they start."""
    identity = device_named(device)
    table = Store(user_folder()).promote(identity, generation)
    _say_active(identity, generation, table, json)


@table_app.command("rollback", epilog="Example: tl-backend table rollback --device nvidia_h200")
def rollback(device: DeviceNameOption = "", json: JsonOption = False) -> None:
    """Undo the last promotion.

    The generation before serves again, or else the shipped table.
    """
    identity = device_named(device)
    generation = Store(user_folder()).rollback(identity)
    table = read_shipped(identity) if generation is None else table_of(f"{identity.name}@{generation}")
    _say_active(identity, generation, table, json)


@table_app.command("carry", epilog="Example: tl-backend table carry nvidia_h200@shipped nvidia_h100_nvl --out t.json")
def carry(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=TARGET)],
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="As `table list` names it.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write the table.")],
    json: JsonOption = False,
) -> None:
    """Make a table for a device that is not here.

    Of the rows of another device's table, it takes those that should be good there, too. They are marked as modelled:
    nobody has measured them.
    """
    table = carried(table_of(source), device_named(device))
    write_table(out, table)
    if json:
        print_json({"out": str(out)} | _summary(table))
    else:
        people().print(f"{out}: {len(table.rows)} rows for {table.label}, modelled, not measured")


def _say_active(device: DeviceIdentity, generation: int | None, table: Table | None, json: bool) -> None:
    if json:
        print_json({"device": device.name, "generation": generation} | _summary(table))
    else:
        people().print(f"{device.name}: {'the family defaults serve' if table is None else f'{table.label} serves'}")


def _problems(read: Callable[[], Table]) -> list[str]:
    try:
        return _row_problems(read())
    except TableError as error:
        return [str(error)]


def _row_problems(table: Table | None) -> list[str]:
    if table is None:
        return []
    device = spec_of(table.device)
    refusals = {f"row {number}": row_refusal(row, device) for number, row in enumerate(table.rows, start=1)}
    for number, entry in enumerate(table.settled, start=1):
        refusals[f"settled {number}"] = settled_refusal(entry, device)
    return [f"{which}: {reason}" for which, reason in refusals.items() if reason is not None]


def _summary(table: Table | None) -> dict[str, Any]:
    if table is None:
        return {"content_hash": None, "rows": None}
    fields = {name: _plain(getattr(table, name)) for name in ("device", "toolchain", "provenance")}
    return {"content_hash": table.content_hash, "rows": len(table.rows), "settled": len(table.settled)} | fields


def _entries(table: Table) -> dict[tuple[Any, Any], Row | Settled]:
    entries: tuple[Row | Settled, ...] = (*table.rows, *table.settled)
    return {(entry.problem, entry.regime): entry for entry in entries}


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _entry_words(entry: Row | Settled | None) -> str:
    if entry is None:
        return "none"
    return (
        "the default is the best" if isinstance(entry, Settled) else f"{_config_words(entry)} {_figure_words(entry)[0]}"
    )


def _config_words(row: Row) -> str:
    from tl_backend.tuner.progress import describe_config  # Imports torch.

    values = row.config.values
    words = "unknown here" if values is None else describe_config(values)
    return words if row.config.family == FAMILY else f"{row.config.family}: {words}"


def _size(regime: Regime) -> tuple[Any, ...]:
    """Small regimes before large ones; a bound that is not there is the largest."""
    sizes = (regime.query_len, regime.context_len, regime.num_requests)
    return (PHASES.index(regime.phase), *(math.inf if size is None else size for size in sizes))


def _source_words(table: Table) -> str:
    """Where the figures are from."""
    gpu = table.provenance.gpu
    if gpu == "none":
        return "CPU"
    return f"not measured, {gpu.removeprefix('none: ')}" if gpu.startswith("none: ") else gpu


def _figure_words(row: Row) -> tuple[str, str]:
    known = row.provenance
    if not isinstance(known, Measured):
        return "modelled", ""
    ratio = known.times_default
    return f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})", f"{known.us:.1f}"
