"""The rules that prune the space of Hopper's prefill, as ``rules`` does the portable family's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import gcd
from typing import NamedTuple

from tl_backend.configs.key import MAX_TILE_KEYS
from tl_backend.configs.prefill_hopper import HopperPrefillConfig, default_hopper_config
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem


class HopperCandidate(NamedTuple):
    """What a rule looks at."""

    config: HopperPrefillConfig
    problem: AttentionProblem
    device: DeviceSpec


HopperRule = Callable[[HopperCandidate], str | None]


def legal(candidate: HopperCandidate) -> str | None:
    """What the kernel itself refuses, of the pages of the class that take most copies: a row serves all of them."""
    page = gcd(candidate.problem.page_size or 0, MAX_TILE_KEYS)
    return candidate.config.illegal_reason(replace(candidate.problem, page_size=page), candidate.device)


def query_tiles(candidate: HopperCandidate) -> str | None:
    """Where two tiles of Q fit, the next is loaded behind the work on the first: 2% at 8192 tokens, 27% at 16 x 512."""
    config = candidate.config
    two = replace(config, q_stages=2)
    if config.q_stages == 1 and two.illegal_reason(candidate.problem, candidate.device) is None:
        return "1 tile of Q, where 2 fit"
    return None


def packing(candidate: HopperCandidate) -> str | None:
    """A tile of one head reads every key again for each head of the group: it is tried with one shape alone."""
    config, group = candidate.config, candidate.problem.group_size
    default = default_hopper_config(candidate.problem, candidate.device)
    if config.heads_per_tile < default.heads_per_tile and replace(default, heads_per_tile=1) != config:
        return f"{config.heads_per_tile} heads a tile of a group of {group}, in another shape than the default's"
    return None


HOPPER_RULES: dict[str, HopperRule] = {"legal": legal, "query tiles": query_tiles, "packing": packing}
