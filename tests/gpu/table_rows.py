"""Every config of a table under the poison harness, on its device.

Run ``python -m tests.gpu.table_rows TABLE.json --out FILE.json``. The tuner's gate lets a candidate pass on one sample;
what a table is to ship is checked here as the family's defaults are by ``tests.gpu.sweep``. Exits with 1 if any missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import torch

from tests.gpu.sweep import Row, machine
from tl_backend.configs.choice import Config, FixedChooser
from tl_backend.configs.decode import DecodeChoice
from tl_backend.configs.key import ProblemKey
from tl_backend.configs.table import Table, read_table
from tl_backend.device import DeviceSpec
from tl_backend.errors import TLBackendError
from tl_backend.ops import workspace
from tl_backend.ops.prepare import load_kernels, required_kernels
from tl_backend.testing.cases import Case
from tl_backend.testing.poison import check_attention
from tl_backend.testing.problems import name

PREFILLS = (
    Case(query_lens=(5, 40, 0, 300, 2), seq_lens=(9, 100, 7, 777, 1025)),
    Case(query_lens=(129, 64, 1, 16), seq_lens=(129, 4161, 1, 17)),
)
DECODES = (
    Case(query_lens=(1, 0, 1, 1, 1), seq_lens=(900, 9, 1, 0, 5000)),
    Case(query_lens=(1,) * 9, seq_lens=(16, 17, 64, 127, 128, 129, 544, 2047, 4352)),
    Case(query_lens=(1, 1, 1), seq_lens=(33, 2049, 300), num_splits=5),
)


def configs(table: Table) -> list[tuple[ProblemKey, Config]]:
    """The distinct ones, each with the class that it is for."""
    found = ((row.problem, row.config.values) for row in table.rows)
    return list(dict.fromkeys((key, config) for key, config in found if config is not None))


def chooser(key: ProblemKey, config: Config, device: DeviceSpec) -> FixedChooser:
    """One that has this config, and the default of the other kernel."""
    given = {"decode" if isinstance(config, DecodeChoice) else "prefill": config}
    return FixedChooser(key.representative(), device, **given)


def check(key: ProblemKey, config: Config, device: torch.device) -> Iterator[Row]:
    """A config's cases."""
    problem = key.representative()
    fixed = chooser(key, config, DeviceSpec.of(device))
    for case in DECODES if isinstance(config, DecodeChoice) else PREFILLS:
        report, message = None, ""
        with mock.patch.object(workspace, "chooser_for", lambda *args, **kwargs: fixed):
            try:
                report = check_attention(problem, case, device)
            except (AssertionError, TLBackendError, RuntimeError) as failure:
                message = f"{type(failure).__name__}: {failure}"
        yield Row(
            problem=name(problem),
            case=f"{config}; {case}",
            error=report and report.error,
            tolerance=report and report.tolerance,
            message=message,
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, metavar="TABLE.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    spec, table = DeviceSpec.of(device), read_table(options.table)
    wanted = configs(table)
    needed = [
        kernel
        for key, config in wanted
        for kernel in required_kernels(key.representative(), spec, chooser=chooser(key, config, spec))
        if kernel.kind != "cache_write"
    ]
    failed = load_kernels(needed)
    rows = [Row(problem="", case=str(key), error=None, tolerance=None, message=text) for key, text in failed.items()]
    for key, config in wanted:
        for row in check(key, config, device):
            print(row, flush=True)
            rows.append(row)
    missed = sum(bool(row.message) for row in rows)
    summary = {
        **machine(device),
        "table": table.label,
        "configs": len(wanted),
        "checks": len(rows),
        "missed": missed,
        "worst": max((row.error for row in rows if row.error is not None), default=None),
    }
    print(json.dumps(summary, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps({**summary, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 1 if missed or not wanted else 0


if __name__ == "__main__":
    sys.exit(main())
