"""What ``tl-backend tune`` has found, for people and for scripts."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table as Grid

from tl_backend.cli.output import people
from tl_backend.configs.rows import Measured, Row
from tl_backend.configs.words import format_problem
from tl_backend.tuner.progress import describe_config
from tl_backend.tuner.tune import Result


def document(result: Result) -> dict[str, Any]:
    """In terms of JSON."""
    return {
        "device": result.device,
        "environment": result.environment,
        "seconds": result.seconds,
        "device_process_starts": result.starts,
        "geomean_by_regime": _geomeans(result),
        "problems": [
            {
                "problem": format_problem(tuned.problem),
                "anchor": tuned.anchor,
                "seconds": tuned.outcome.seconds,
                "measuring_seconds": tuned.outcome.measuring_s,
                "kinds": {
                    kind: {
                        "candidates": len(found.candidates),
                        "complete": found.complete,
                        "error": found.error,
                        "refused": {str(found.candidates[i]): why for i, why in found.refused.items()},
                    }
                    for kind, found in tuned.outcome.kinds.items()
                },
                "rows": [row.model_dump(mode="json") for row in tuned.entries.rows],
                "settled": [entry.model_dump(mode="json") for entry in tuned.entries.settled],
                "open": tuned.entries.open,
            }
            for tuned in result.problems
        ],
        "left": [format_problem(problem) for problem in result.left],
    }


def _geomeans(result: Result) -> dict[str, float]:
    """By regime, over all problems: how many times faster than the default a launch is with the table."""
    logs: dict[str, list[float]] = {}
    for tuned in result.problems:
        for row in tuned.entries.rows:
            logs.setdefault(str(row.regime), []).append(math.log(_figures(row).times_default.median))
        for entry in tuned.entries.settled:
            logs.setdefault(str(entry.regime), []).append(0.0)
    return {regime: math.exp(sum(values) / len(values)) for regime, values in logs.items()}


def _figures(row: Row) -> Measured:
    assert isinstance(row.provenance, Measured), "a search measures"
    return row.provenance


def _config(row: Row) -> str:
    assert row.config.values is not None, "a search knows its configs"
    return describe_config(row.config.values)


def show(result: Result, written: dict[str, Any]) -> None:
    """For people, on stdout."""
    console = people()
    for tuned in result.problems:
        console.print(format_problem(tuned.problem), style="bold", markup=False)
        grid = Grid("regime", "config", "us", "default us", "x default")
        for row in tuned.entries.rows:
            figures = _figures(row)
            gain = figures.times_default
            grid.add_row(
                str(row.regime),
                _config(row),
                f"{figures.us:.1f}",
                f"{figures.default_us:.1f}",
                f"{gain.median:.2f} ({gain.low:.2f} to {gain.high:.2f})",
            )
        for entry in tuned.entries.settled:
            grid.add_row(str(entry.regime), "the default", f"{entry.us:.1f}", f"{entry.us:.1f}", "1.00")
        for regime in tuned.entries.open:
            grid.add_row(regime, "not finished", "", "", "")
        console.print(grid)
        for kind, found in tuned.outcome.kinds.items():
            words = f"{kind}: {len(found.candidates)} candidates, {len(found.refused)} refused"
            console.print(words if found.error is None else f"{words}; {found.error}", markup=False)
        console.print(f"{tuned.outcome.seconds:.1f} s, of which the device measured {tuned.outcome.measuring_s:.1f} s.")
    if len(result.problems) > 1:
        means = Grid("regime", "x default, geomean")
        for regime, mean in _geomeans(result).items():
            means.add_row(regime, f"{mean:.3f}")
        console.print(means)
    if result.left:
        console.print(f"No time was left for {len(result.left)} problems; the same command goes on with them.")
    if written["table"] is not None:
        console.print(f"{written['table']}: {written['rows']} rows, hash {written['hash'][:8]}", markup=False)
        if "path" in written:
            console.print(str(written["path"]), markup=False, soft_wrap=True)
        if written.get("active") is False:
            console.print(f"It does not serve yet: tl-backend table promote {written['generation']}", markup=False)
    if written["note"]:
        console.print(written["note"], markup=False)
