"""A config space in words: how many candidates, what was pruned and why, and what is left."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tl_backend.configs.choice import KINDS, Config
from tl_backend.configs.decode import DecodeChoice
from tl_backend.configs.key import ProblemKey
from tl_backend.configs.space import Pruned, space, tile_of
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem


def explain(problem: AttentionProblem, device: DeviceSpec) -> str:
    """The spaces of a problem on a device, as text.

    Raises:
        UnsupportedError: no config serves the problem on this device.
    """
    kinds = KINDS if problem.is_paged else ("prefill",)
    parts = [f"{ProblemKey.of(problem)} on {device.name} ({device.arch}, {device.multiprocessors} multiprocessors)"]
    return "\n\n".join([*parts, *(_kind(kind, problem, device) for kind in kinds)])


def _kind(kind: str, problem: AttentionProblem, device: DeviceSpec) -> str:
    found = space(kind, problem, device)
    total = len(found.kept) + len(found.pruned)
    lines = [f"{kind}: {total} candidates, {len(found.kept)} kept, {len(found.pruned)} pruned"]
    by_rule: dict[str, list[Pruned]] = {}
    for pruned in found.pruned:
        by_rule.setdefault(pruned.rule, []).append(pruned)
    for rule, those in by_rule.items():
        shape = tile_of(those[0].config)
        example = f"{shape.block_m} x {shape.block_n}: {those[0].reason}"
        lines.append(f"  {len(those):>5} by {rule}, such as {example}")
    return "\n".join([*lines, *_table(found.kept)])


def _table(configs: tuple[Config, ...]) -> list[str]:
    """One row a config, the default first; columns whose values are all the same are one line above."""
    rows = [_values(config) for config in configs]
    names = list(rows[0])
    same = [name for name in names if len(rows) > 1 and len({row[name] for row in rows}) == 1]
    columns = [name for name in names if name not in same]
    widths = {name: max(len(name), *(len(str(row[name])) for row in rows)) for name in columns}
    lines = ["  in all: " + ", ".join(f"{name} {rows[0][name]}" for name in same)] if same else []
    header = {name: name for name in columns}
    table = ["  " + "  ".join(str(row[name]).rjust(widths[name]) for name in columns) for row in (header, *rows)]
    table[1] += "  (default)"
    return lines + table


def _values(config: Config) -> dict[str, Any]:
    tile = tile_of(config)
    values = {field.name: getattr(tile, field.name) for field in fields(tile)}
    if isinstance(config, DecodeChoice):
        values["blocks_per_multiprocessor"] = config.blocks_per_multiprocessor
    return values
