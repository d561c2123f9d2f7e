"""Hopper's prefill against the portable one on random batches: no hang, no wrong bit.

Run ``python -m tests.gpu.random_batches --batches 2000 --out FILE.json``; ``--device cpu`` tries the program itself, on
two C tiles. Everything is compiled first, side by side. Then a process of its own runs batch after batch;
one that gives no outcome in time is a hang, and one that dies a crash: it costs its batch, and another process goes on.
The same seed gives the same batches: ``--first N --batches 1`` is batch N again. Prints what fails, writes it as JSON
with the GPU and the versions, and exits with 1 if anything did.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.gpu.random_cases import Drawn
from tests.gpu.random_check import Outcome, drawn_of, keys_of, serve
from tests.gpu.sweep import machine
from tl_backend.device import DeviceSpec
from tl_backend.ops.build import build_kernels
from tl_backend.ops.child import Child, ChildLostError, Serve
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.launcher import Artifact
from tl_backend.testing.problems import name

START_S = 300.0  # Of a process that imports from a cold disk and loads all kernels.
BATCH_S = 60.0  # A batch takes less than one; the first of a process, and one whose kernel is compiled late, more.
MAX_LOST = 8  # Processes that die before the run is given up.
EVERY = 20  # Each n-th batch is compared with float64, too.


@dataclass(kw_only=True)
class Tally:
    """What came of the batches of a run. Attributes: apart, error: worst of each problem; recipes: batches of each."""

    batches: int = 0
    against_reference: int = 0
    captured: int = 0
    batch_invariant: int = 0
    recipes: Counter[str] = field(default_factory=Counter)
    apart: dict[str, float] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, seed: int, drawn: Drawn, outcome: Outcome) -> None:
        problem = name(drawn.problem)
        self.batches += 1
        self.captured += drawn.captured
        self.batch_invariant += drawn.batch_invariant
        self.recipes[drawn.recipe] += 1
        for worst, value in ((self.apart, outcome.apart), (self.error, outcome.error)):
            if value is not None:
                worst[problem] = max(worst.get(problem, 0.0), value)
        self.against_reference += outcome.error is not None
        if outcome.message:
            failure = {
                "seed": seed,
                "batch": drawn.number,
                "problem": problem,
                "recipe": drawn.recipe,
                "case": str(drawn.case),
                "batch_invariant": drawn.batch_invariant,
                "slack": drawn.slack,
                "tail": drawn.tail,
                "captured": drawn.captured,
                "message": outcome.message,
            }
            self.failures.append(failure)
            print(
                f"MISS seed {seed}, batch {drawn.number} ({drawn.recipe}), {problem}: {outcome.message}\n     {drawn}"
            )


def run(
    seed: int,
    numbers: range,
    device: torch.device,
    artifacts: dict[KernelKey, Artifact],
    *,
    limit_s: float = BATCH_S,
    every: int = EVERY,
    served: Serve = serve,
) -> tuple[Tally, dict[str, int]]:
    """Every batch, in processes that replace each other; the tally, and launches of all that came to their end.

    Args:
        served: what a process does; another one proves the watchdog.
    """
    tally, launched, lost = Tally(), Counter[str](), 0
    spec = DeviceSpec.of(device)
    child = None
    plain = {key: tuple(artifact) for key, artifact in artifacts.items()}
    for done, number in enumerate(numbers):
        drawn = drawn_of(seed, number, spec)
        try:
            if child is None:
                child = Child(served)
                child.send((seed, str(device), every, plain))
                child.receive(START_S)
            child.send(number)
            outcome = child.receive(limit_s)
        except ChildLostError as failure:
            child, lost = None, lost + 1
            outcome = Outcome(message=f"hang or crash: {failure}")
        tally.add(seed, drawn, outcome)
        if done % 100 == 99:
            print(f"{done + 1} of {len(numbers)} batches, {len(tally.failures)} failures", flush=True)
        if lost >= MAX_LOST:
            print(f"given up: {lost} processes were lost")
            break
    if child is not None:
        child.send(None)
        launched.update(child.receive(limit_s))
        child.kill()
    return tally, dict(launched)


def compile_all(keys: list[KernelKey], processes: int | None) -> tuple[dict[KernelKey, Artifact], dict[KernelKey, str]]:
    """The library of each kernel, or why there is none."""

    def show(done: int, total: int, kind: str) -> None:
        if done and (done % 20 == 0 or done == total):
            print(f"compiled {done} of {total}, last a {kind}", flush=True)

    built = build_kernels(keys, processes=processes, on_progress=show)
    failed = {key: error for key, error in built.items() if isinstance(error, str)}
    for key, error in failed.items():
        print(f"MISS {key.kind} of {name(key.problem)}: {error}")
    return {key: artifact for key, artifact in built.items() if isinstance(artifact, Artifact)}, failed


def commit() -> str:
    """Of the checkout; empty where it has no history."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def unserved(launched: dict[str, int], kinds: set[str]) -> list[str]:
    """Kinds that were compiled for and never launched: a run without them proves nothing of them."""
    return sorted(kind for kind in kinds if not launched.get(kind))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda or cpu (a dry run)")
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first batch")
    parser.add_argument("--every", type=int, default=EVERY, metavar="N", help="compare each n-th with float64, too")
    parser.add_argument("--limit", type=float, default=BATCH_S, metavar="SECONDS", help="after which a batch hangs")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile side by side")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    keys = keys_of(DeviceSpec.of(device))
    print(f"{options.batches} batches of seed {options.seed} from {options.first}, {len(keys)} kernels", flush=True)
    begin = time.monotonic()
    artifacts, failed = compile_all(keys, options.processes)
    compiled_s, begin = time.monotonic() - begin, time.monotonic()
    numbers = range(options.first, options.first + options.batches)
    tally, launched = run(options.seed, numbers, device, artifacts, limit_s=options.limit, every=options.every)
    late = launched.pop("compiled late", 0)
    # A handful of batches need not split anything.
    missing = unserved(launched, {key.kind for key in keys}) if options.batches >= 200 else []
    summary = {
        "commit": commit(),
        **machine(device),
        "seed": options.seed,
        "first": options.first,
        "batches": tally.batches,
        "asked": options.batches,
        "failed": len(tally.failures),
        "not_compiled": {f"{key.kind} of {name(key.problem)}": why for key, why in failed.items()},
        "compiled_late": late,
        "never_launched": missing,
        "kernels": len(keys),
        "compile_s": round(compiled_s, 1),
        "run_s": round(time.monotonic() - begin, 1),
        "launches": launched,
        "against_reference": tally.against_reference,
        "captured": tally.captured,
        "batch_invariant": tally.batch_invariant,
        "recipes": dict(tally.recipes),
        "worst_apart": tally.apart,
        "worst_error": tally.error,
    }
    print(json.dumps(summary, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps({**summary, "failures": tally.failures}, indent=1) + "\n")
    complete = tally.batches == options.batches
    return 0 if complete and not (tally.failures or failed or late or missing) else 1


if __name__ == "__main__":
    sys.exit(main())
