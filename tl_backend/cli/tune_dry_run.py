"""What ``tl-backend tune`` would do, without a device: the spaces, their kernels, and their code if asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rich.table import Table as Grid

from tl_backend.cli.output import people, print_json, progress
from tl_backend.cli.tune_codegen import generate_all
from tl_backend.configs.explain import explain
from tl_backend.configs.words import format_problem
from tl_backend.device import DeviceSpec
from tl_backend.ops.compile_pool import num_processes
from tl_backend.ops.compiled import KernelKey
from tl_backend.problem import AttentionProblem
from tl_backend.tuner.anchors import anchor_class, distinct
from tl_backend.tuner.kernels import kernels_of
from tl_backend.tuner.tune import plan_of

# What a kernel takes to compile, by vendor: 5 to 9 s with nvcc or hipcc, well under one with a C compiler.
COMPILE_S = {"nvidia": 6.0, "amd": 6.0, "cpu": 1.0}


def dry_run(
    problems: Iterable[AttentionProblem],
    device: DeviceSpec,
    kinds: tuple[str, ...],
    processes: int | None,
    *,
    generate: bool,
    explained: bool,
    json: bool,
) -> bool:
    """Print candidates, kernels, cases and the time that compiling takes; whether all code could be generated."""
    rows: list[dict[str, Any]] = []
    keys: dict[KernelKey, None] = {}
    anchors, spaces = set(), []
    for problem in distinct(problems):
        if (group := anchor_class(problem)) in anchors:
            rows.append({"problem": format_problem(problem), "anchor": False})
            continue
        anchors.add(group)
        spaces.append(explain(problem, device))
        plan = plan_of(problem, device, kinds=kinds)
        for kind, configs in plan.candidates.items():
            own = {key: None for config in configs for key in kernels_of(config, problem, device)}
            keys |= own
            rows.append(
                {
                    "problem": format_problem(problem),
                    "anchor": True,
                    "kind": kind,
                    "candidates": len(configs),
                    "kernels": len(own),
                    "cases": [str(case) for case in plan.cases[kind]],
                }
            )
    workers = num_processes(processes)
    seconds = math.ceil(len(keys) / workers) * COMPILE_S[device.vendor]
    failed = generate_all(keys, processes, progress()) if generate else {}
    reasons = {f"{key.kind} {key.config}": reason for key, reason in failed.items()}
    document = {
        "device": device.name,
        "kernels": len(keys),
        "processes": workers,
        "compile_seconds": seconds,
        "searches": rows,
        "failed": reasons,
    } | ({"spaces": spaces} if explained else {})
    if json:
        print_json(document)
    else:
        for text in spaces if explained else ():
            people().print(text, markup=False, highlight=False, soft_wrap=True)
        grid = Grid("problem", "kind", "candidates", "kernels", "cases")
        for row in rows:
            if row["anchor"]:
                counts = (str(row["candidates"]), str(row["kernels"]), str(len(row["cases"])))
                grid.add_row(row["problem"], row["kind"], *counts)
            else:
                grid.add_row(row["problem"], "both", "its anchor's best", "", "")
        people().print(grid)
        people().print(f"{len(keys)} kernels in {workers} processes: about {seconds:.0f} s on {device.name}.")
        if generate:
            people().print(f"Code was generated for {len(keys) - len(failed)} of them.")
        for name, reason in reasons.items():
            people().print(f"{name}: {reason}", markup=False)
    return not failed
