"""The acceptance kit: what a node's owner runs once and sends back: is it right here, how fast, and with which configs.

The file is whole at every moment: it is replaced after every row, and says how far the run came.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from tl_backend import __version__
from tl_backend.cli.acceptance_plan import Plan, kernels_of, plan_for
from tl_backend.cli.acceptance_worker import Ceiling, Check, Measure, Worker
from tl_backend.cli.doctor import examine
from tl_backend.cli.output import plain
from tl_backend.configs.identity import device_identity
from tl_backend.configs.table import Table
from tl_backend.configs.words import format_problem
from tl_backend.device import DeviceSpec
from tl_backend.errors import InvalidInputError, describe
from tl_backend.ops.build import build_kernels
from tl_backend.ops.child import ChildLostError
from tl_backend.testing.problems import name

SCHEMA = 1
BUDGET_S = 3600.0
# Parts of the budget at which a stage has to be over.
ENDS = {"correctness": 0.35, "tuning": 0.8, "benchmark": 1.0}
# Works whose kernels compile side by side before they are checked: some for each core, and the budget is kept to.
SLICE = 8
COMPILE_S = {"nvidia": 6.0, "amd": 6.0, "cpu": 1.0}  # Of one kernel on one core.
CHECK_S, MEASURE_S = 10.0, 15.0  # Of one problem and one workload on a GPU, compiled.


class Report:
    """The document and its file.

    Args:
        path: of the file.
        device: what it is about.

    Raises:
        InvalidInputError: the file cannot be written.
    """

    def __init__(self, path: Path, device: DeviceSpec, **fields: Any) -> None:
        self.path = path
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            "tl_backend": __version__,
            "state": "started",
            "started": _now(),
            "finished": None,
            "device": device,
            "identity": device_identity(device),
            **fields,
            "errors": {},
        }
        self.write()

    def write(self) -> None:
        """Replace the file by the document."""
        partial = self.path.with_name(f".{self.path.name}.partial")
        try:
            partial.write_text(json.dumps(plain(self.document), indent=1, allow_nan=False) + "\n")
            partial.replace(self.path)
        except OSError as error:
            raise InvalidInputError(
                describe(
                    "--acceptance", value=error, limit="it must be a file that can be written", remedy="Name another."
                )
            ) from error

    @contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        """A stage: its failure is written down and costs no other; Ctrl-C ends the run."""
        self.document["state"] = f"in {stage}"
        self.write()
        try:
            yield
        except KeyboardInterrupt:
            self.document["state"] = f"interrupted in {stage}"
            self.write()
            raise
        except Exception as error:  # noqa: BLE001
            self.document["errors"][stage] = f"{type(error).__name__}: {error}"
        self.write()

    def finish(self) -> None:
        """Write down that every stage has had its turn."""
        self.document |= {"state": "complete", "finished": _now()}
        self.write()

    @property
    def has_failed(self) -> bool:
        """Whether a stage failed, or an answer was wrong."""
        rows = self.document.get("correctness", {}).get("rows", [])
        return bool(self.document["errors"]) or any(row["failures"] for row in rows)


def accept(
    path: Path, device: DeviceSpec, console: Console, *, budget_s: float = BUDGET_S, plan: Plan | None = None
) -> Report:
    """Run every stage on this machine's device.

    Args:
        path: the file to write; logs of processes and the tuner's journals lie in a folder beside it.
        budget_s: seconds in all; what does not fit is listed as left.
        plan: default: the device's.

    Raises:
        KeyboardInterrupt: the file then says so.
        InvalidInputError: the file cannot be written.
    """
    from tl_backend.measure.results import environment

    plan, begun = plan or plan_for(device), time.monotonic()
    report, work = Report(path, device, budget_s=budget_s), path.with_name(f"{path.stem}-work")
    work.mkdir(exist_ok=True)

    def left(stage: str) -> float:
        return begun + ENDS[stage] * budget_s - time.monotonic()

    table: list[Table] = []
    torch_device = _torch_device(device)
    with Worker(torch_device.type, work / "processes.log") as worker:
        with report.stage("environment"):
            report.document["environment"] = environment(torch_device)
        with report.stage("doctor"):
            report.document["doctor"] = examine()
        with report.stage("correctness"):
            _correctness(report, plan, device, worker, lambda: left("correctness"), console)
        worker.close()  # The tuner has a process of its own, and wants the device's memory.
        with report.stage("tuning"):
            table += _tuning(report, plan, device, work, left("tuning"), console)
        with report.stage("benchmark"):
            _benchmark(report, plan, worker, table[0] if table else None, lambda: left("benchmark"), console)
    report.finish()
    return report


def rehearse(path: Path, device: DeviceSpec, console: Console, *, plan: Plan | None = None) -> Report:
    """Everything up to the launch, for a device that need not be here: what would run, how long, and its code."""
    from tl_backend.cli.tune_codegen import generate_all
    from tl_backend.ops.compile_pool import num_processes
    from tl_backend.tuner.anchors import anchor_class, distinct
    from tl_backend.tuner.tune import plan_of

    plan = plan or plan_for(device)
    report = Report(path, device, dry_run=True)
    keys = list(dict.fromkeys(key for work in plan.work for key in kernels_of(work, device)))
    with report.stage("doctor"):
        report.document["doctor"] = examine()
    with report.stage("plan"):
        anchors = {anchor_class(problem): problem for problem in reversed(list(distinct(plan.tuned)))}
        candidates = {
            format_problem(problem): {kind: len(found) for kind, found in plan_of(problem, device).candidates.items()}
            for problem in anchors.values()
        }
        count = sum(sum(kinds.values()) for kinds in candidates.values())
        rate = COMPILE_S[device.vendor] / num_processes()
        report.document["plan"] = {
            "correctness": [name(work.problem) for work in plan.work],
            "tuning": [format_problem(problem) for problem in plan.tuned],
            "candidates": candidates,
            "benchmark": [workload.name for workload in plan.workloads],
            "seconds": {
                "correctness": math.ceil(len(keys) * rate + CHECK_S * len(plan.work)),
                "tuning": math.ceil(count * rate),
                "benchmark": math.ceil(MEASURE_S * len(plan.workloads)),
            },
        }
    with report.stage("code"):
        failed = generate_all(keys, None, console)
        report.document["code"] = {
            "kernels": len(keys),
            "failed": {f"{key.kind} {format_problem(key.problem)}": reason for key, reason in failed.items()},
        }
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(keys)} kernels have no code for {device.arch}")
    report.finish()
    return report


def _correctness(
    report: Report, plan: Plan, device: DeviceSpec, worker: Worker, left: Callable[[], float], console: Console
) -> None:
    rows: list[dict[str, Any]] = []
    found = report.document["correctness"] = {"rows": rows, "left": []}
    for start in range(0, len(plan.work), SLICE):
        works = plan.work[start : start + SLICE]
        if left() <= 0:
            found["left"] = [name(work.problem) for work in plan.work[start:]]
            break
        # What does not compile fails again where it is launched, by name.
        build_kernels(key for work in works for key in kernels_of(work, device))
        for work in works:
            try:
                row = worker.ask(Check(work=work))
            except ChildLostError as error:
                row = {"problem": name(work.problem), "kinds": list(work.kinds), "failures": [f"process: {error}"]}
            rows.append(row)
            report.write()
            console.print(
                f"correctness {len(rows)} of {len(plan.work)}: {row['problem']}: {_verdict(row)}", markup=False
            )


def _verdict(row: dict[str, Any]) -> str:
    return row["failures"][0] if row["failures"] else f"relative RMS {row['error']:.1e}, limit {row['tolerance']:.0e}"


def _tuning(
    report: Report, plan: Plan, device: DeviceSpec, folder: Path, seconds: float, console: Console
) -> list[Table]:
    """The table of what was found: none where nothing was finished."""
    from tl_backend.cli.tune_report import document
    from tl_backend.tuner.entries import table_of
    from tl_backend.tuner.progress import Progress
    from tl_backend.tuner.tune import Options, tune

    if seconds <= 0:
        report.document["tuning"] = {"left": [format_problem(problem) for problem in plan.tuned]}
        return []
    result = tune(plan.tuned, device, folder, Progress(console), Options(budget_s=seconds))
    found = report.document["tuning"] = document(result)
    entries = [tuned.entries for tuned in result.problems]
    if not any(each.rows or each.settled for each in entries):
        return []
    table = table_of(entries, result.device, result.environment)
    found["table"] = table.model_dump(mode="json")
    return [table]


def _benchmark(
    report: Report, plan: Plan, worker: Worker, table: Table | None, left: Callable[[], float], console: Console
) -> None:
    rows: list[dict[str, Any]] = []
    found = report.document["benchmark"] = {"rows": rows, "left": []}
    if left() > 0:
        ceilings = worker.ask(Ceiling())
        found["ceilings"] = ceilings
    for number, workload in enumerate(plan.workloads):
        if left() <= 0:
            found["left"] = [each.name for each in plan.workloads[number:]]
            break
        try:
            row = worker.ask(Measure(workload=workload, table=table, ceilings=ceilings))
        except ChildLostError as error:
            row = {"name": workload.name, "problems": f"process: {error}"}
        rows.append(row)
        report.write()
        said = row["problems"] or ", ".join(f"{each} {value['us']:.0f} us" for each, value in row["kernels"].items())
        console.print(f"benchmark {number + 1} of {len(plan.workloads)}: {workload.name}: {said}", markup=False)


def _torch_device(device: DeviceSpec) -> Any:
    import torch

    return torch.device("cuda" if device.is_gpu else "cpu")


def _now() -> str:
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
