"""``tl-backend doctor``: what vLLM would use here and why, and what is in the way."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tl_backend.cli.doctor_machine import (
    check_cache,
    check_compiler,
    check_devices,
    check_home,
    check_outcome,
    check_space,
    check_table,
)
from tl_backend.cli.doctor_packages import (
    check_backend_variable,
    check_entry_point,
    check_installation,
    check_python,
    check_settings,
    check_tilelang,
    check_torch,
    check_vllm,
    check_vllm_plugins,
)
from tl_backend.cli.doctor_rows import Check, Finding, run_checks
from tl_backend.cli.options import ArchOption, MultiprocessorsOption, device_of
from tl_backend.cli.output import JsonOption, people, print_json
from tl_backend.device import DeviceSpec
from tl_backend.errors import InvalidInputError, describe

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    acceptance: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Check, tune and measure this device, and write the file.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --acceptance: all but the launches, for --arch as well.")
    ] = False,
    budget: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="Of --acceptance, in all. Default: 3600.")
    ] = None,
    arch: ArchOption = None,
    multiprocessors: MultiprocessorsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what vLLM would use here and why.

    A row for each thing that decides it, with a remedy where one is needed.

    With --acceptance, check every kind of kernel against a reference, tune the shipped problems, and benchmark beside
    the peers that are there. Its file is meant to be sent back; an interrupted run leaves a valid one that says so.

    Exits with 1 if something keeps vLLM from serving with this backend, or if a part of the acceptance fails. Warnings
    do not count.

    \b
    Examples:
      tl-backend doctor
      tl-backend doctor --acceptance mi300x.json --budget 1800
      tl-backend doctor --acceptance plan.json --dry-run --arch gfx942
    """  # noqa: D301 click wants the character.
    if acceptance is not None:
        from tl_backend.cli.acceptance_command import run

        run(acceptance, dry_run=dry_run, budget=budget, arch=arch, multiprocessors=multiprocessors, as_json=as_json)
        return
    for option, given in (("--dry-run", dry_run), ("--budget", budget), ("--arch", arch)):
        if given:
            raise InvalidInputError(
                describe(
                    option, value="no --acceptance", limit="it is a part of that", remedy="Add --acceptance FILE.json."
                )
            )
    rows = examine()
    if as_json:
        print_json({"healthy": not _has_problem(rows), "rows": rows})
    else:
        people().print(_table(rows))
    if _has_problem(rows):
        raise typer.Exit(1)


def examine() -> list[Finding]:
    """All rows for this machine."""
    before: list[tuple[str, Check]] = [
        ("Python", check_python),
        ("torch", check_torch),
        ("vLLM", check_vllm),
        ("tl-backend", check_installation),
        ("vLLM plugin", check_entry_point),
        ("VLLM_PLUGINS", check_vllm_plugins),
        ("VLLM_ATTENTION_BACKEND", check_backend_variable),
        ("settings", check_settings),
        ("device", check_devices),
    ]
    device = _device()
    after: list[tuple[str, Check]] = [
        ("TileLang", partial(check_tilelang, device)),
        ("compiler", partial(check_compiler, device)),
        ("table", partial(check_table, device)),
        ("kernel cache", check_cache),
        ("HOME", check_home),
        ("space", check_space),
        ("outcome", partial(check_outcome, device)),
    ]
    return run_checks([*before, *after])


def _device() -> DeviceSpec:
    """What further checks are about. A device that cannot be asked has its own row, and a CPU stands for it here."""
    try:
        return device_of()
    except Exception:  # noqa: BLE001
        return DeviceSpec.absent("c")


def _has_problem(rows: list[Finding]) -> bool:
    return any(row.state == "problem" for row in rows)


def _table(rows: list[Finding]) -> Table:
    table = Table("check", "state", "found")
    for row in rows:
        remedy = f"\n[dim]{escape(row.remedy)}[/]" if row.remedy else ""
        table.add_row(escape(row.check), f"[{_COLOURS[row.state]}]{row.state}[/]", escape(row.value) + remedy)
    return table
