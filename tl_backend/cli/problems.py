"""Options that name problems: by word, by a model's config.json, or all of the shipped tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tl_backend.configs.models import problem_from_hf_config, shipped_now
from tl_backend.configs.words import GRAMMAR, parse_problem
from tl_backend.device import DeviceSpec
from tl_backend.errors import InvalidInputError, describe
from tl_backend.problem import AttentionProblem

ProblemsOption = Annotated[
    list[str] | None,
    typer.Option("--problem", metavar="SPEC", help=f"{GRAMMAR}; causal unless full. Can be given several times."),
]
ModelOption = Annotated[
    Path | None, typer.Option("--model", metavar="FILE", help="A model's config.json: its layers' problems.")
]
EveryOption = Annotated[bool, typer.Option("--all", help="The problems of the shipped tables.")]
TPOption = Annotated[int, typer.Option("--tp", min=1, metavar="N", help="Ranks that share the model's heads.")]
PageSizeOption = Annotated[
    int | None,
    typer.Option(
        "--page-size",
        min=16,
        metavar="N",
        help="Of --model's KV cache: vLLM's --block-size. Default: what a server has, 128 on Hopper and CPUs, else 16.",
    ),
]


def chosen_problems(
    specs: list[str] | None, model: Path | None, every: bool, tp_size: int, page_size: int | None, device: DeviceSpec
) -> list[AttentionProblem]:
    """What these options name; a model in the dtype that it is served in, which on a CPU is float32.

    Raises:
        InvalidInputError: not one of the three, or no model's config.
        UnsupportedError: no kernel serves the model's attention.
    """
    given = [bool(specs), model is not None, every]
    if sum(given) != 1:
        raise InvalidInputError(
            describe(
                "which problems",
                value=f"{sum(given)} of --problem, --model and --all",
                limit="one of them is needed",
                remedy="Pass --problem 32/8,D128,page16,bfloat16, for example.",
            )
        )
    if every:
        return list(shipped_now().values())
    if model is None:
        return [parse_problem(spec) for spec in specs or []]
    try:
        config = json.loads(model.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(
            describe("--model", value=error, limit="a model's config.json is needed", remedy="Pass its path.")
        ) from None
    if not isinstance(config, dict):
        raise InvalidInputError(
            describe(
                "--model", value=f"a JSON {type(config).__name__}", limit="an object", remedy="Pass a config.json."
            )
        )
    dtype = None if device.is_gpu else device.dtypes[0]
    return problem_from_hf_config(config, tp_size=tp_size, page_size=page_size or device.page_size, dtype=dtype)
