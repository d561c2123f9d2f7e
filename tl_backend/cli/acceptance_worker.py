"""The process in which the acceptance kit launches kernels: on hardware that nobody has run, one may take it along."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tl_backend.cli.output import plain
from tl_backend.configs.table import Table
from tl_backend.device import DeviceSpec
from tl_backend.errors import TLBackendError
from tl_backend.measure.workload import Workload
from tl_backend.ops.child import Child, ChildLostError
from tl_backend.testing.cases import Case
from tl_backend.testing.problems import Work, name

# Of one request, compiling what is not in the cache and the slowest of references included.
ANSWER_S = 600.0
START_S = 300.0
CPU_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Check:
    """Run a problem's cases under the poison harness."""

    work: Work


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """Measure the roofline."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Time a workload beside its peers, on the configs of a table where one was tuned."""

    workload: Workload
    table: Table | None
    ceilings: Any


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The device's context may be lost: the process ends."""

    reason: str


class Worker:
    """The parent's end: the next request after a loss starts another process.

    Args:
        device: "cuda" or "cpu".
        log: file for what the process prints.
    """

    def __init__(self, device: str, log: Path) -> None:
        self._device, self._log = device, log
        self._child: Child | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: Check | Ceiling | Measure) -> Any:
        """The answer to a request.

        Raises:
            ChildLostError: the request took the process along, or had no answer in time.
        """
        try:
            child = self._running()
            child.send(request)
            answer = child.receive(ANSWER_S)
        except ChildLostError:
            self.close()
            raise
        if isinstance(answer, Lost):
            self.close()
            raise ChildLostError(answer.reason)
        return answer

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _running(self) -> Child:
        if self._child is None:
            self._child = Child(serve, log=self._log)
            self._child.send(self._device)
            self._child.receive(START_S)
        return self._child


def serve(connection: Connection) -> None:
    """Answer requests until the pipe ends or the device fails. The device's type comes first."""
    import torch

    from tl_backend.measure.peers_aiter import import_first

    device = torch.device(connection.recv())
    import_first()
    handlers: dict[type, Callable[..., Any]] = {Check: _check, Ceiling: _ceiling, Measure: _measure}
    connection.send(None)  # Ready.
    while True:
        request = connection.recv()
        try:
            answer = handlers[type(request)](request, device)
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            connection.send(Lost(reason=f"{type(error).__name__}: {_short(error)}"))
            sys.exit(1)
        connection.send(answer)


def _check(request: Check, device: Any) -> dict[str, Any]:
    from tl_backend.testing.contiguous import check_varlen
    from tl_backend.testing.poison import check_attention
    from tl_backend.testing.poison_judge import TOLERANCES

    problem, begun = request.work.problem, time.monotonic()
    check = check_attention if problem.is_paged else check_varlen
    error, failures = 0.0, []

    def run(case: Case) -> float | str:
        try:
            return check(problem, case, device).error
        except (AssertionError, TLBackendError) as failure:  # A wrong answer or a refusal: the device goes on.
            return f"{case}: {_short(failure)}"

    for found in map(run, request.work.cases):
        if isinstance(found, str):
            failures.append(found)
        else:
            error = max(error, found)
    return {
        "problem": name(problem),
        "kinds": list(request.work.kinds),
        "cases": len(request.work.cases),
        "error": error,
        "tolerance": TOLERANCES[problem.dtype],
        "failures": failures,
        "seconds": round(time.monotonic() - begun, 1),
    }


def _ceiling(_request: Ceiling, device: Any) -> Any:
    from tl_backend.measure.ceilings import ceilings

    return ceilings(device)


def _measure(request: Measure, device: Any) -> Any:
    from tl_backend.configs.lookup import Tables
    from tl_backend.measure.rows import measure_row
    from tl_backend.measure.timing import MAX_ROUNDS, ROUNDS

    problem = request.workload.problem
    tables = Tables(DeviceSpec.of(device), () if request.table is None else (request.table,))
    rounds, most = (ROUNDS, MAX_ROUNDS) if device.type == "cuda" else (CPU_ROUNDS, CPU_ROUNDS)
    is_decode = max(request.workload.query_lens) == 1
    chooser = tables.chooser(problem)
    row = measure_row(
        request.workload, device, request.ceilings, chooser=chooser, cold=is_decode, rounds=rounds, max_rounds=most
    )
    return plain(asdict(row))


def _short(error: BaseException) -> str:
    """The first line: torch's messages hold stack traces."""
    return next(iter(str(error).strip().splitlines()), "no message")[:600]
