"""Configs beside the one that is chosen, as they are given on a command line."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

from tl_backend.configs.choice import FixedChooser
from tl_backend.configs.prefill import default_prefill_config
from tl_backend.device import DeviceSpec
from tl_backend.errors import InvalidInputError, TLBackendError, describe
from tl_backend.problem import AttentionProblem

# The portable family's default, whatever is chosen.
PORTABLE = "portable"


def parse_variants(text: str) -> dict[str, dict[str, Any]]:
    """Overrides of a config's fields, by name.

    Args:
        text: ``block_n=128 heads_per_tile=1; block_n=160``, or ``portable``, or a JSON list of objects.

    Raises:
        InvalidInputError: it is none of these.
    """
    try:
        if text.lstrip().startswith("["):
            return {_name(overrides): overrides for overrides in json.loads(text)}
        found = [_overrides(part) for part in text.split(";") if part.strip()]
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidInputError(
            describe(
                "--variants",
                value=repr(text),
                limit="FIELD=NUMBER ...; FIELD=NUMBER ..., the word portable, or a JSON list of objects",
                remedy='Pass "block_n=128 heads_per_tile=1; block_n=160".',
            )
        ) from error
    return {_name(overrides): overrides for overrides in found}


def variant_chooser(problem: AttentionProblem, device: DeviceSpec, overrides: dict[str, Any]) -> FixedChooser:
    """The chooser of the family's default with these fields.

    Raises:
        TLBackendError: the config has no such field, or cannot run.
    """
    if overrides == {PORTABLE: True}:
        config: Any = default_prefill_config(problem, device)
    else:
        default: Any = FixedChooser(problem, device).configs("prefill")[0]
        if unknown := overrides.keys() - {known.name for known in fields(default)}:
            raise TLBackendError(f"a {type(default).__name__} has no {', '.join(sorted(unknown))}")
        config = replace(default, **overrides)
        if (reason := config.illegal_reason(problem, device)) is not None:
            raise TLBackendError(f"not legal: {reason}")
    return FixedChooser(problem, device, prefill=config, source=f"variant {_name(overrides)}")


def _overrides(part: str) -> dict[str, Any]:
    if part.strip() == PORTABLE:
        return {PORTABLE: True}
    pairs = (word.split("=") for word in part.split())
    return {name: int(value) for name, value in pairs}


def _name(overrides: dict[str, Any]) -> str:
    return PORTABLE if PORTABLE in overrides else " ".join(f"{name}={value}" for name, value in overrides.items())
