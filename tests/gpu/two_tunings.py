"""Two tables of one device, their choices timed against each other on the same tensors.

Run ``python -m tests.gpu.two_tunings A.json B.json --out FILE.json`` with the tables of two searches of one problem.
Prints each regime's ratio, and exits with 1 if the choices of one are slower than the other's by more than 2% anywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.gpu.sweep import machine
from tl_backend.configs.choice import Config, FixedChooser, default_config
from tl_backend.configs.key import ProblemKey
from tl_backend.configs.regime import Regime
from tl_backend.configs.table import Table, read_table
from tl_backend.device import DeviceSpec
from tl_backend.measure.timing import as_graph, ratio, time_ms
from tl_backend.measure.workload import Batch, Workload
from tl_backend.tuner.admission import SHORT_MS
from tl_backend.tuner.regimes import cases

LIMIT = 0.02
ROUNDS = 31


def choices(table: Table) -> dict[tuple[ProblemKey, Regime], Config | None]:
    """The config of each entry; None for the default."""
    found: dict[tuple[ProblemKey, Regime], Config | None] = {
        (row.problem, row.regime): row.config.values for row in table.rows
    }
    return found | {(entry.problem, entry.regime): None for entry in table.settled}


def compare(key: ProblemKey, regime: Regime, pair: tuple[Config, Config], device: torch.device) -> dict[str, Any]:
    """How many times faster the second choice is than the first."""
    problem, spec = key.representative(), DeviceSpec.of(device)
    case = next(case for case in cases(regime.kind, problem, spec) if case.regime == regime)
    workload = Workload(
        name=str(case),
        problem=problem,
        query_lens=(case.query_len,) * case.num_requests,
        seq_lens=(case.seq_len,) * case.num_requests,
    )
    batch = Batch(workload, device)
    launches = {
        name: batch.tilelang(FixedChooser(problem, spec, **{regime.kind: config}))[0]
        for name, config in zip("ab", pair, strict=True)
    }
    short = min(time_ms(launches, device, rounds=1)["a"]) <= SHORT_MS
    if short:
        launches = {name: as_graph(launch, device) for name, launch in launches.items()}
    times = time_ms(launches, device, rounds=ROUNDS, cold=short)
    return ratio(times["b"], times["a"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs=2, metavar="TABLE.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    first, second = (choices(read_table(path)) for path in options.tables)
    rows = []
    for key, regime in first.keys() & second.keys():
        default = default_config(regime.kind, key.representative(), DeviceSpec.of(device))
        pair = (first[key, regime] or default, second[key, regime] or default)
        row = {"problem": str(key), "regime": str(regime), "same": pair[0] == pair[1]}
        row["b_times_a"] = {"median": 1.0} if row["same"] else compare(key, regime, pair, device)
        rows.append(row)
        print(f"{row['b_times_a']['median']:.3f}  {'same  ' if row['same'] else 'others'}  {key}, {regime}", flush=True)
    apart = [row for row in rows if abs(row["b_times_a"]["median"] - 1) > LIMIT]
    summary = {**machine(device), "regimes": len(rows), "same": sum(row["same"] for row in rows), "apart": len(apart)}
    print(json.dumps(summary, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps({**summary, "rows": rows}, indent=1) + "\n")
    return 1 if apart or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
