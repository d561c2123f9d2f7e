"""Which kernel ``tl-backend inspect`` means: a kind, a problem, and a config in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from tl_backend.cli.options import format_problem
from tl_backend.device import DeviceSpec
from tl_backend.errors import InvalidInputError, UnsupportedError, describe
from tl_backend.problem import AttentionProblem

if TYPE_CHECKING:
    from tl_backend.configs.choice import PrefillConfig
    from tl_backend.configs.prefill_hopper import HopperPrefillConfig
    from tl_backend.ops.compiled import KernelKey

KINDS = ("prefill", "prefill_hopper", "prefill_combine", "decode", "decode_combine", "cache_write", "merge")
T = TypeVar("T")


def kernel_key(kind: str, problem: AttentionProblem, device: DeviceSpec, config: str | None = None) -> KernelKey:
    """The key of a kernel with its default config, or with fields of it replaced.

    Args:
        config: JSON, an object of such fields. Those of a decode are its tile's, and "split".

    Raises:
        InvalidInputError: an unknown kernel, or a config that is malformed or illegal.
        UnsupportedError: the device does not serve the problem.
    """
    from tl_backend.configs.decode import default_decode_tile
    from tl_backend.configs.prefill import default_prefill_config
    from tl_backend.ops.cache_write import cache_write_key, cache_write_problem
    from tl_backend.ops.checks import check_supported
    from tl_backend.ops.decode import decode_keys
    from tl_backend.ops.merge import merge_key
    from tl_backend.ops.prefill import combine_key, prefill_key

    if kind not in KINDS:
        raise InvalidInputError(
            describe("--kernel", value=kind, limit=f"one of {', '.join(KINDS)}", remedy="Pass one of them.")
        )
    if not problem.is_paged and kind not in ("prefill", "merge"):
        raise InvalidInputError(
            describe(
                "problem", value="contiguous", limit=f"{kind} is for a cache", remedy="Say page16, or another page."
            )
        )
    check_supported(problem, device)
    changes = _changes(config)
    if kind in ("prefill", "prefill_hopper"):
        default = (default_prefill_config if kind == "prefill" else _default_hopper)(problem, device)
        chosen: PrefillConfig = _changed(default, changes)
        _check_legal(chosen.illegal_reason(problem, device))
        return prefill_key(problem, chosen, device)
    if kind == "decode":
        split = bool(changes.pop("split", True))
        tile = _changed(default_decode_tile(problem, device), changes)
        _check_legal(tile.illegal_reason(problem, device))
        return decode_keys(problem, tile, device, split=split)[0]
    if kind == "cache_write":
        key = cache_write_key(cache_write_problem(problem), device)
        return key._replace(config=_changed(key.config, changes))
    if changes:
        raise InvalidInputError(
            describe("--config", value=config, limit=f"{kind} has no choices", remedy="Leave it out.")
        )
    if kind == "merge":
        return merge_key(problem, device)
    if kind == "prefill_combine":
        _default_hopper(problem, device)  # Refuses what needs no combine.
        return combine_key(problem, device)
    return decode_keys(problem, default_decode_tile(problem, device), device, split=True)[1]


def _default_hopper(problem: AttentionProblem, device: DeviceSpec) -> HopperPrefillConfig:
    """The default of Hopper's prefill.

    Raises:
        UnsupportedError: the family does not take the problem.
    """
    from tl_backend.configs.prefill_hopper import default_hopper_config, hopper_refusal

    if (reason := hopper_refusal(problem, device)) is not None:
        raise UnsupportedError(
            describe(
                f"Hopper's prefill of {format_problem(problem)}",
                value=f"none, since {reason}",
                limit="the portable one serves what it does not take",
                remedy="Pass --kernel prefill.",
            )
        )
    return default_hopper_config(problem, device)


def _changes(config: str | None) -> dict[str, Any]:
    if config is None:
        return {}
    try:
        value = json.loads(config)
    except ValueError as error:
        value = error
    if not isinstance(value, dict):
        example = '\'{"block_m": 128, "threads": 256}\''
        raise InvalidInputError(
            describe("--config", value=config, limit="it must be a JSON object", remedy=f"An example: {example}.")
        )
    return value


def _changed(default: T, changes: Mapping[str, Any]) -> T:
    """The default with fields replaced, each by a value of its type."""
    values = {field.name: getattr(default, field.name) for field in fields(default)}  # type: ignore[arg-type]
    types = {name: int if value is None else type(value) for name, value in values.items()}  # None: TileLang's choice.
    for name, value in changes.items():
        if name not in types or type(value) is not types[name] or (types[name] is int and value < 0):
            said = ", ".join(f"{field} ({kind.__name__})" for field, kind in types.items())
            raise InvalidInputError(
                describe("--config", value=f"{name} = {value!r}", limit=f"the fields are {said}", remedy="Correct it.")
            )
    return replace(default, **changes)  # type: ignore[type-var]


def _check_legal(reason: str | None) -> None:
    if reason is not None:
        raise UnsupportedError(
            describe("config", value=reason, limit="the device must be able to run it", remedy="Choose a smaller tile.")
        )
