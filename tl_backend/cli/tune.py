"""``tl-backend tune``: search the best configs on this machine's device, and keep them as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tl_backend.cli.options import ArchOption, MultiprocessorsOption, ProcessesOption, check_runs_here, device_of
from tl_backend.cli.output import JsonOption, print_json, progress
from tl_backend.cli.problems import (
    EveryOption,
    ModelOption,
    PageSizeOption,
    ProblemsOption,
    TPOption,
    chosen_problems,
)
from tl_backend.configs.choice import KINDS
from tl_backend.errors import InvalidInputError, describe
from tl_backend.settings import Settings

if TYPE_CHECKING:
    from tl_backend.configs.table import Table
    from tl_backend.device import DeviceSpec
    from tl_backend.tuner.store import Store
    from tl_backend.tuner.tune import Result

INTERRUPTED = 130  # 128 + SIGINT, as shells have it.
NOTHING_FOUND = 1


def tune(
    problem: ProblemsOption = None,
    model: ModelOption = None,
    every: EveryOption = False,
    tp_size: TPOption = 1,
    page_size: PageSizeOption = None,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="prefill or decode. Default: both.")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget", min=1, metavar="SECONDS", help="Stop after so long, and keep what was found."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget what earlier searches and the table have found.")
    ] = False,
    promote: Annotated[
        bool, typer.Option("--promote", help="Let the new table serve at once; `table promote` does it later.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write this table file instead of a generation.")
    ] = None,
    processes: ProcessesOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be searched; needs no device.")] = False,
    generate: Annotated[
        bool, typer.Option("--compile", help="With --dry-run: generate the code of every kernel.")
    ] = False,
    explained: Annotated[
        bool, typer.Option("--explain", help="With --dry-run: which configs were pruned and why, and what is left.")
    ] = False,
    arch: ArchOption = None,
    multiprocessors: MultiprocessorsOption = None,
    json: JsonOption = False,
) -> None:
    """Search the best kernel configs on this GPU, and keep a table of them.

    The table is a new generation in the folder of TL_BACKEND_TABLE_DIR, for this kind of GPU, with the rows of the
    active one. An interrupted search goes on where it was when the command is given again. What the active table (or
    --out's) has is not searched again, and problems that differ from its in head counts alone try only what was best
    there.

    \b
    Examples:
      tl-backend tune --problem 32/8,D128,page16,bfloat16 --promote
      tl-backend tune --model /path/to/config.json --tp 2 --promote
      tl-backend tune --all --dry-run --arch h100
    """  # noqa: D301 click wants the character.
    kinds = _kinds(kind)
    _check_options(dry_run=dry_run, generate=generate, explained=explained, arch=arch, promote=promote, out=out)
    device = device_of(arch, multiprocessors)
    problems = chosen_problems(problem, model, every, tp_size, page_size, device)
    for one in problems:
        check_runs_here(one, device)
    if dry_run:
        from tl_backend.cli.tune_dry_run import dry_run as rehearse

        if not rehearse(problems, device, kinds, processes, generate=generate, explained=explained, json=json):
            raise typer.Exit(NOTHING_FOUND)
        return
    from tl_backend.cli.tune_report import document, show
    from tl_backend.tuner.progress import Progress
    from tl_backend.tuner.store import Store
    from tl_backend.tuner.tune import Options
    from tl_backend.tuner.tune import tune as search

    store = Store(Settings.from_env().table_dir)
    base, note = _base(store, out, device)
    options = Options(kinds=kinds, budget_s=budget, fresh=fresh, base=base, processes=processes)
    try:
        result = search(problems, device, store.folder, Progress(progress()), options)
    except KeyboardInterrupt:
        progress().print("Interrupted. The same command goes on from here.")
        raise typer.Exit(INTERRUPTED) from None
    written = {"note": note} | _write(result, store, out, base, promote=promote)
    if json:
        print_json(document(result) | written)
    else:
        show(result, written)
    if result.problems and all(tuned.outcome.failed for tuned in result.problems):
        raise typer.Exit(NOTHING_FOUND)


def _kinds(kind: str | None) -> tuple[str, ...]:
    if kind is None:
        return KINDS
    if kind not in KINDS:
        limit = f"the kinds are {', '.join(KINDS)}"
        raise InvalidInputError(describe("--kind", value=kind, limit=limit, remedy="Pass one of them."))
    return (kind,)


def _check_options(
    *, dry_run: bool, generate: bool, explained: bool, arch: str | None, promote: bool, out: Path | None
) -> None:
    for wrong, subject, limit, remedy in (
        (arch is not None and not dry_run, "--arch", "a search runs on this machine's device", "Add --dry-run."),
        (generate and not dry_run, "--compile", "a search compiles anyway", "Add --dry-run, or leave it out."),
        (explained and not dry_run, "--explain", "it is about what a search would try", "Add --dry-run."),
        (promote and out is not None, "--promote", "a file of --out is no generation", "Leave one of the two out."),
        (promote and dry_run, "--promote", "a dry run finds nothing", "Leave one of the two out."),
    ):
        if wrong:
            raise InvalidInputError(describe(subject, value="given", limit=limit, remedy=remedy))


def _base(store: Store, out: Path | None, device: DeviceSpec) -> tuple[Table | None, str | None]:
    """The table that the search goes on from and is merged with, and why there is none where one was expected."""
    import torch

    from tl_backend.configs.generations import read_active
    from tl_backend.configs.identity import device_identity
    from tl_backend.configs.table import read_table
    from tl_backend.measure.results import environment
    from tl_backend.tuner.entries import toolchain_of
    from tl_backend.tuner.resume import usable

    identity = device_identity(device)
    if out is None:
        base = read_active(store.folder, identity)
    else:
        base = read_table(out, device=identity) if out.exists() else None
    here = toolchain_of(environment(torch.device("cuda" if device.is_gpu else "cpu")))
    if base is None:
        return None, None
    if base.toolchain != here:
        why = "they are of another toolchain. Tune them again."
        return None, f"{len(base.rows)} rows of {base.label} are left out: {why}"
    kept, reasons = usable(base, device)
    if reasons:
        return kept, f"{len(reasons)} entries of {base.label} are left out, such as: {reasons[0]}."
    return kept, None


def _write(result: Result, store: Store, out: Path | None, base: Table | None, *, promote: bool) -> dict[str, Any]:
    """Keep the entries; what was written where."""
    from tl_backend.configs.generations import device_folder, generation_path
    from tl_backend.tuner.entries import table_of
    from tl_backend.tuner.store import write_table

    entries = [tuned.entries for tuned in result.problems]
    if not any(found.rows or found.settled for found in entries):
        why = "Everything was there" if result.known and not result.problems else "Nothing was finished"
        return {"table": None, "note": f"{why}, so nothing was written."}
    table: Table = table_of(entries, result.device, result.environment, base=base)
    if out is not None:
        write_table(out, table)
        return {"table": out, "rows": len(table.rows), "hash": table.content_hash}
    generation = store.write_generation(table)
    if promote:
        store.promote(result.device, generation)
    return {
        "table": f"{result.device.name} generation {generation}",
        "generation": generation,
        "active": promote,
        "path": generation_path(device_folder(store.folder, result.device), generation),
        "rows": len(table.rows),
        "hash": table.with_generation(generation).content_hash,
    }
