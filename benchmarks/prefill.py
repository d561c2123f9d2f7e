"""Paged prefill and extend on a Hopper GPU beside FlashAttention-3 as vLLM calls it.

Run ``python -m benchmarks.prefill --out FILE.json [--plot FILE.png]``; ``--from FILE.json`` shows a file again, without
a GPU. All kernels of a row take turns on the same tensors as CUDA-graph replays, after each answer was checked against
float64 in a sample of its rows, before and after capture. What the device does once a step (FA3's scheduler metadata,
the upload of our plan) is charged to each, divided by 32 layers; ``with host`` charges the host's part, too. A row that
fails is told and does not end the run, but a row that hangs does: exit code 1 says that there is one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.prefill_cases import CASES, PAGES, chosen
from benchmarks.prefill_goals import failures, summary
from benchmarks.variants import parse_variants
from tl_backend.errors import InvalidInputError

ROW_SECONDS = 1.5
ROW_TIMEOUT_S = 60.0


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, help="write the rows to this JSON file, after each of them")
    add("--plot", type=Path, help="draw them to this PNG file")
    add("--from", dest="source", type=Path, metavar="FILE", help="measure nothing: show what was written to this file")
    add("--only", action="append", default=[], metavar="SUBSTRING", help="rows in whose name this is; may be repeated")
    add("--pages", default=",".join(map(str, PAGES)), metavar="16,128", help="page sizes (default: %(default)s)")
    add("--variants", default="", help='configs beside the chosen one: "block_n=128 heads_per_tile=1; block_n=160"')
    add("--defaults", action="store_true", help="the family's default configs instead of this device's table")
    add("--rounds", type=int, default=31, help="between two looks at the intervals (default: %(default)s)")
    add("--row-seconds", type=float, default=ROW_SECONDS, help="most seconds of a row's rounds (default: %(default)s)")
    add("--quick", action="store_true", help="11 rounds whatever the intervals, and torch's ceilings alone")
    add(
        "--row-timeout",
        type=float,
        default=ROW_TIMEOUT_S,
        help="seconds after which a row hangs (default: %(default)s)",
    )
    add("--list", action="store_true", help="print the rows' names")
    found = parser.parse_args(argv)
    try:
        found.pages = tuple(int(word) for word in found.pages.split(","))
        found.variants = parse_variants(found.variants)
    except (ValueError, InvalidInputError) as error:
        parser.error(str(error))
    found.cases = chosen(found.only)
    if not found.cases:
        parser.error(f"--only {' '.join(found.only)} leaves none of {', '.join(case.name for case in CASES)}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or show; 1 if a row has no figure."""
    options = arguments(argv)
    if options.list:
        print("\n".join(case.name for case in options.cases))
        return 0
    document = measure(options) if options.source is None else json.loads(options.source.read_text())
    print(summary(document))
    if options.plot is not None:
        plot(document, options.plot)
    return 1 if failures(document) else 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The rows, in terms of JSON."""
    import torch

    from benchmarks.prefill_run import Run
    from tl_backend.measure.rows import Method

    method = partial(Method, least_us=100.0, max_seconds=options.row_seconds)
    run = Run(
        torch.device("cuda"),
        options.cases,
        options.pages,
        method=method(rounds=11, max_rounds=11) if options.quick else method(rounds=options.rounds),
        variants=options.variants,
        out=options.out,
        takes_defaults=options.defaults,
        row_timeout_s=options.row_timeout,
    )
    begun = time.perf_counter()
    run.compile()
    compiled = time.perf_counter()
    run.measure(own_ceilings=not options.quick)
    print(f"compiled in {compiled - begun:.1f} s, measured in {time.perf_counter() - compiled:.1f} s")
    return run.document()


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw, where that can be."""
    if find_spec("matplotlib") is None:
        print(f"no plot: matplotlib is not installed; where it is, --from the JSON file --plot {path} draws it")
        return
    from benchmarks.prefill_plot import draw

    draw(document, path)


if __name__ == "__main__":
    sys.exit(main())
