"""The configs that are worth compiling for a problem on a device, and why the others are not."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from tl_backend.configs.choice import Config, PrefillConfig, default_config
from tl_backend.configs.decode import DecodeChoice
from tl_backend.configs.dimensions import candidates
from tl_backend.configs.prefill_hopper import HopperPrefillConfig, hopper_refusal
from tl_backend.configs.rules import PREFILL_RULES, RULES, Candidate
from tl_backend.configs.rules_hopper import HOPPER_RULES, HopperCandidate
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """A candidate that is not worth compiling. Attributes: rule: its short name; reason: one line, with numbers."""

    config: Config
    rule: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is left of a product of dimensions.

    Attributes:
        kept: without repeats, the default first, then by the number of values that differ from its: a search that runs
            out of time has tried what is near.
        pruned: the other candidates.
    """

    kept: tuple[Config, ...]
    pruned: tuple[Pruned, ...]


def space(kind: str, problem: AttentionProblem, device: DeviceSpec) -> Space:
    """The space of a kernel, "prefill" or "decode".

    Raises:
        UnsupportedError: no config serves the problem on this device.
    """
    default = default_config(kind, problem, device)
    kept: dict[Config, None] = {default: None}
    pruned: list[Pruned] = []
    for config in candidates(kind, problem, device):
        if config in kept:
            continue
        found = verdict(kind, config, problem, device)
        if found is None:
            kept[config] = None
        else:
            pruned.append(Pruned(config=config, rule=found[0], reason=found[1]))
    nearest_first = sorted(
        kept, key=lambda config: sum(a != b for a, b in zip(_values(config), _values(default), strict=True))
    )
    return Space(kept=tuple(nearest_first), pruned=tuple(pruned))


def tile_of(config: Config) -> PrefillConfig:
    """What a config's kernels are compiled for: the tile of a decode, of a prefill all of it."""
    return config.tile if isinstance(config, DecodeChoice) else config


def _values(config: Config) -> tuple[object, ...]:
    """Of all its fields."""
    blocks = (config.blocks_per_multiprocessor,) if isinstance(config, DecodeChoice) else ()
    return (*astuple(tile_of(config)), *blocks)


def verdict(kind: str, config: Config, problem: AttentionProblem, device: DeviceSpec) -> tuple[str, str] | None:
    """(rule, reason) of the first rule that prunes a config of a kind, or None. No rule prunes the default."""
    if isinstance(config, DecodeChoice) and (reason := config.illegal_reason(problem, device)) is not None:
        return "legal", reason
    tile = tile_of(config)
    if isinstance(tile, HopperPrefillConfig):
        found = ((name, rule(HopperCandidate(tile, problem, device))) for name, rule in HOPPER_RULES.items())
    elif kind == "prefill" and hopper_refusal(problem, device) is None:
        # Nobody compares the families launch by launch: a row of this one was measured against its own default.
        return "family", f"a portable tile, where Hopper's family takes head size {problem.head_dim}"
    else:
        rules = PREFILL_RULES if kind == "prefill" else RULES
        found = ((name, rule(Candidate(tile, problem, device))) for name, rule in rules.items())
    return next(((name, reason) for name, reason in found if reason is not None), None)
