"""``tl-backend doctor --acceptance``: runs the kit, or its rehearsal, and says what came out."""

from __future__ import annotations

from pathlib import Path

import typer

from tl_backend.cli.acceptance import BUDGET_S, Report, accept, rehearse
from tl_backend.cli.options import device_of
from tl_backend.cli.output import people, print_json, progress
from tl_backend.errors import InvalidInputError, describe

INTERRUPTED = 130  # 128 + SIGINT, as shells have it.


def run(
    path: Path,
    *,
    dry_run: bool,
    budget: float | None,
    arch: str | None,
    multiprocessors: int | None,
    as_json: bool,
) -> None:
    """Run it; exits with 1 if a part failed, with 130 after Ctrl-C."""
    if arch is not None and not dry_run:
        raise InvalidInputError(
            describe("--arch", value=arch, limit="kernels run on this machine's device", remedy="Add --dry-run.")
        )
    device, console = device_of(arch, multiprocessors), progress()
    try:
        if dry_run:
            report = rehearse(path, device, console)
        else:
            report = accept(path, device, console, budget_s=budget or BUDGET_S)
    except KeyboardInterrupt:
        console.print(f"Interrupted. {path} holds what was found until then.", markup=False)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_json(report.document)
    else:
        _show(report)
    if report.has_failed:
        raise typer.Exit(1)


def _show(report: Report) -> None:
    document, console = report.document, people()
    for stage, error in document["errors"].items():
        console.print(f"{stage} failed: {error}", markup=False)
    if "plan" in document:
        plan = document["plan"]
        for stage in ("correctness", "tuning", "benchmark"):
            console.print(f"{stage}: {len(plan[stage])} problems, about {plan['seconds'][stage]} s")
    if "code" in document:
        code = document["code"]
        console.print(f"code: {code['kernels'] - len(code['failed'])} of {code['kernels']} kernels")
    rows = document.get("correctness", {}).get("rows", [])
    if rows:
        wrong = [row for row in rows if row["failures"]]
        console.print(f"correctness: {len(rows) - len(wrong)} of {len(rows)} problems are right")
        for row in wrong:
            console.print(f"  {row['problem']}: {row['failures'][0]}", markup=False)
    if "table" in document.get("tuning", {}):
        table = document["tuning"]["table"]
        console.print(f"tuning: {len(table['rows'])} rows beat the default, {len(table['settled'])} do not")
    for row in document.get("benchmark", {}).get("rows", []):
        said = row["problems"] or ", ".join(f"{name} {kernel['us']:.0f} us" for name, kernel in row["kernels"].items())
        console.print(f"benchmark, {row['name']}: {said}", markup=False)
    console.print(f"{report.path}: send it back.", markup=False)
