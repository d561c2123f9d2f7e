"""Which problems of a list are searched whole, and what the others try."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tl_backend.configs.choice import Config
from tl_backend.configs.decode import DecodeChoice
from tl_backend.configs.key import ProblemKey
from tl_backend.configs.space import space, tile_of
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem

# Of an anchor's candidates, what the others of its class try beside their default.
FINALISTS = 6


def kinds_of(problem: AttentionProblem) -> tuple[str, ...]:
    """The kernels that a problem has: contiguous keys are never decoded."""
    return ("prefill", "decode") if problem.is_paged else ("prefill",)


def distinct(problems: Iterable[AttentionProblem]) -> tuple[AttentionProblem, ...]:
    """The first problem of each key: the others have its rows."""
    found: dict[ProblemKey, AttentionProblem] = {}
    for problem in problems:
        found.setdefault(ProblemKey.of(problem), problem)
    return tuple(found.values())


def anchor_class(problem: AttentionProblem) -> ProblemKey:
    """What problems have in common whose best tiles are alike: all but their head counts."""
    return dataclasses.replace(ProblemKey.of(problem), num_q_heads=1, num_kv_heads=1)


def shape(config: Config) -> Config:
    """A config without the heads of its tile, which follow from the problem's group."""
    if isinstance(config, DecodeChoice):
        return dataclasses.replace(config, tile=dataclasses.replace(config.tile, heads_per_tile=1))
    return dataclasses.replace(tile_of(config), heads_per_tile=1)


def transferred(
    kind: str, finalists: Iterable[Config], problem: AttentionProblem, device: DeviceSpec
) -> tuple[Config, ...]:
    """The default of a problem, and those of its space that have the shape of an anchor's finalist."""
    shapes = set(map(shape, finalists))
    default, *others = space(kind, problem, device).kept
    return (default, *(config for config in others if shape(config) in shapes))
