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
FINALISTS = 4
# What a search takes beside its compiling, in kernels that could have been compiled meanwhile.
FINALS_IN_KERNELS = 10


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
    return class_of(ProblemKey.of(problem))


def class_of(key: ProblemKey) -> ProblemKey:
    """The anchor class of problems with this key."""
    return dataclasses.replace(key, num_q_heads=1, num_kv_heads=1)


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


def shares(
    problems: Iterable[AttentionProblem], known: Iterable[ProblemKey], device: DeviceSpec, kinds: Iterable[str]
) -> list[int]:
    """What each problem of a list is to take of a time budget, relative to the others: compiling is nearly all of it.

    Args:
        known: anchor classes whose finalists are there.
    """
    classes, kinds, found = set(known), tuple(kinds), []
    for problem in problems:
        is_anchor = anchor_class(problem) not in classes
        classes.add(anchor_class(problem))
        num_kernels = 0
        for kind in (kind for kind in kinds_of(problem) if kind in kinds):
            configs = space(kind, problem, device).kept
            if not is_anchor:  # Which those will be is not known yet: any stand for them.
                configs = transferred(kind, configs[1 : FINALISTS + 1], problem, device)
            num_kernels += len({tile_of(config) for config in configs}) * (2 if kind == "decode" else 1)
        found.append(num_kernels + FINALS_IN_KERNELS)
    return found
