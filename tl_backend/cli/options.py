"""Options that commands share: a problem in one word, and the device that a command is about."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from tl_backend.configs.identity import BY_NAME, spec_of
from tl_backend.configs.words import EXAMPLE, GRAMMAR, format_problem, parse_problem
from tl_backend.device import SHARED_MEMORY_PER_BLOCK, DeviceSpec
from tl_backend.errors import InvalidInputError, describe
from tl_backend.problem import AttentionProblem

__all__ = [  # The words of a problem are for commands, too.
    "ARCHES",
    "EXAMPLE",
    "GRAMMAR",
    "ArchOption",
    "MultiprocessorsOption",
    "ProblemOption",
    "ProcessesOption",
    "check_runs_here",
    "device_of",
    "format_problem",
    "parse_problem",
]

ARCHES = (*SHARED_MEMORY_PER_BLOCK, "c")

ProblemOption = Annotated[str, typer.Option("--problem", metavar="SPEC", help=f"{GRAMMAR}; causal unless full.")]
ArchOption = Annotated[
    str | None,
    typer.Option(
        "--arch",
        metavar="ARCH",
        help=f"{', '.join(ARCHES)}, or a device such as h100 or mi300x. It need not be here. Default: this machine's.",
    ),
]
MultiprocessorsOption = Annotated[
    int | None,
    typer.Option(
        "--multiprocessors", min=1, metavar="N", help="SMs or compute units of --arch. Default: its largest GPU's."
    ),
]

ProcessesOption = Annotated[
    int | None, typer.Option("--processes", min=1, metavar="N", help="That compile. Default: all cores.")
]


def device_of(arch: str | None = None, multiprocessors: int | None = None) -> DeviceSpec:
    """The device of an architecture or of a name that tables have; by default this machine's, which imports torch.

    Args:
        arch: "sm_90", "gfx942", "c"; or "nvidia_h100", "h100", "mi300x", ...
        multiprocessors: of an architecture's device.

    Raises:
        InvalidInputError: an unknown architecture or name, or multiprocessors without an architecture.
        UnsupportedError: a GPU that the kernels do not serve.
    """
    if arch is None:
        if multiprocessors is not None:
            raise InvalidInputError(
                describe("--multiprocessors", value=multiprocessors, limit="it goes with --arch", remedy="Add --arch.")
            )
        import torch

        return DeviceSpec.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    named = [BY_NAME[name] for name in (arch, f"nvidia_{arch}", f"amd_{arch}") if name in BY_NAME]
    if named and multiprocessors is None:
        return spec_of(named[0])
    name = re.sub(r"^(sm_\d+)a$", r"\1", arch)  # Hopper's "a" is how TileLang is told, not another device.
    if name not in ARCHES:
        raise InvalidInputError(
            describe(
                "--arch",
                value=arch,
                limit=f"the architectures are {', '.join(ARCHES)}; the devices {', '.join(BY_NAME)}",
                remedy="Pass one.",
            )
        )
    return DeviceSpec.absent(name, multiprocessors=multiprocessors)


def check_runs_here(problem: AttentionProblem, device: DeviceSpec) -> None:
    """A GPU's dtype where no GPU is.

    Raises:
        InvalidInputError: says what to write in a problem's word, which has no --dtype.
    """
    if not device.is_gpu and problem.dtype not in device.dtypes:
        raise InvalidInputError(
            describe(
                "problem on the CPU",
                value=problem.dtype,
                limit="no GPU is here, and the CPU takes float32",
                remedy="Write float32, or name a device with --arch where the command has it.",
            )
        )
