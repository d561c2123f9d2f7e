"""One search with planted faults, on the C target: each fault costs its candidate, and nothing is done twice."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.tuner import planted
from tl_backend.configs.decode import default_decode_choice
from tl_backend.configs.prefill import default_prefill_config
from tl_backend.configs.regime import Regime
from tl_backend.device import DeviceSpec
from tl_backend.ops.compile_pool import CompilePool
from tl_backend.testing.cases import make_problem
from tl_backend.tuner.device_process import DeviceProcess
from tl_backend.tuner.found import Outcome, Plan
from tl_backend.tuner.halving import DEFAULT
from tl_backend.tuner.journal import Journal
from tl_backend.tuner.kernels import Kernels
from tl_backend.tuner.progress import Progress
from tl_backend.tuner.regimes import Case
from tl_backend.tuner.search import search as search_problem
from tl_backend.tuner.state import State

DEVICE = DeviceSpec.absent("c")
PROBLEM = make_problem(2, 1, 32, 16)
IDENTITY = {"problem": "2/1", "device": {"name": "cpu"}}
FAULTS = (planted.FINE, planted.CRASHES, planted.HANGS, planted.WRONG, planted.FORGETS_ROWS, planted.CHANGES)
# Longer than any answer here takes, on a machine that does other things as well.
WATCHDOG_S = 15.0


def case(query_len: int, seq_len: int, num_requests: int) -> Case:
    phase = "decode" if query_len == 1 else "prefill"
    regime = Regime.of(phase=phase, query_len=query_len, context_len=seq_len, num_requests=num_requests)
    return Case(regime=regime, query_len=query_len, seq_len=seq_len, num_requests=num_requests)


def plan(*, faults: tuple[int, ...] = FAULTS) -> Plan:
    tile = default_prefill_config(PROBLEM, DEVICE)
    decode = default_decode_choice(PROBLEM, DEVICE)
    return Plan(
        problem=PROBLEM,
        device=DEVICE,
        candidates={
            "prefill": (tile, replace(tile, block_n=16), replace(tile, threads=planted.CRASHES_LATER)),
            "decode": tuple(replace(decode, tile=replace(decode.tile, threads=fault)) for fault in faults),
        },
        cases={"prefill": (case(40, 40, 2),), "decode": (case(1, 100, 1), case(1, 50, 3))},
    )


def search(folder: Path, what: Plan, **arguments) -> tuple[Outcome, Kernels, DeviceProcess]:
    log = folder / "log"
    with (
        CompilePool(log=log) as pool,
        DeviceProcess("cpu", log=log, watchdog_s=WATCHDOG_S, serve=planted.begin) as process,
        Journal(folder / "journal", IDENTITY) as journal,
    ):
        kernels = Kernels(pool)
        progress = Progress(Console(file=io.StringIO()))
        state = State(what, kernels=kernels, process=process, journal=journal, progress=progress, **arguments)
        found = search_problem(state)
    return found, kernels, process


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Outcome, DeviceProcess]]:
    folder = tmp_path_factory.mktemp("search")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tl_backend.tuner.halving.MIN_ROUNDS", 8)
        patch.setattr("tl_backend.tuner.halving.MAX_ROUNDS", 8)
        found, _, process = search(folder, plan())
        yield folder, found, process


def test_each_fault_costs_its_candidate_alone(searched) -> None:
    _, found, process = searched
    decode, prefill = found.kinds["decode"], found.kinds["prefill"]
    assert decode.error is prefill.error is None
    assert decode.refused.keys() == {1, 2, 3, 4, 5}
    assert decode.refused[1] == "process: killed by SIGSEGV"
    assert decode.refused[2] == f"process: no answer within {WATCHDOG_S:.0f} s; killed"
    assert "relative RMS" in decode.refused[3]
    assert "not finite" in decode.refused[4]
    assert "differ in a second run" in decode.refused[5]
    # It passed the gate and the screen, and took a group along: only those that do so alone are out.
    assert prefill.refused == {2: "process: exited with code 3"}
    assert process.starts == 1 + 2 + 2


def test_every_case_has_paired_times_of_what_is_left(searched) -> None:
    _, found, _ = searched
    for kind, indices in (("prefill", {0, 1}), ("decode", {0})):
        result = found.kinds[kind]
        assert result.complete
        assert result.finals.keys() == set(plan().cases[kind])
        for times in result.finals.values():
            assert DEFAULT in times
            assert times.keys() <= indices
            assert len({len(samples) for samples in times.values()}) == 1
    assert found.measuring_s <= found.seconds


def test_what_is_known_is_neither_compiled_nor_launched_again(searched, tmp_path: Path) -> None:
    folder, before, _ = searched
    shutil.copy(folder / "journal", tmp_path)
    after, kernels, process = search(tmp_path, plan())
    assert kernels.artifacts == kernels.errors == {}
    assert process.starts == 0
    assert {kind: found.finals for kind, found in after.kinds.items()} == {
        kind: found.finals for kind, found in before.kinds.items()
    }
    assert after.kinds["decode"].refused == before.kinds["decode"].refused


def test_an_interrupted_search_goes_on_after_its_last_whole_line(searched, tmp_path: Path) -> None:
    folder, _, _ = searched
    lines = (folder / "journal").read_bytes().splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if b'"screened"' in line and b'"prefill"' in line)
    # Without the last candidate of a kind, all finals are held again.
    (tmp_path / "journal").write_bytes(b"".join(lines[: first + 1]) + b'{"event": "screened", "kind": "pre')
    what = plan(faults=(planted.FINE,))
    found, _, process = search(tmp_path, replace_prefills(what))
    assert process.starts == 1
    assert found.kinds["prefill"].screened.keys() == set(what.cases["prefill"])
    events = [json.loads(line) for line in (tmp_path / "journal").read_bytes().splitlines()]
    screens = [event["kind"] for event in events if event["event"] == "screened"]
    assert sorted(screens) == ["decode", "prefill", "prefill"]  # One of each from before, and the other prefill.
    assert all(result.complete and result.finals for result in found.kinds.values())


def replace_prefills(what: Plan) -> Plan:
    """Without the one that crashes."""
    return replace(what, candidates={**what.candidates, "prefill": what.candidates["prefill"][:2]})


@pytest.mark.parametrize(("deadline", "reserve"), [(0.0, 0.2), (1e12, 1.0)], ids=["all of it", "that of admission"])
def test_a_search_whose_time_is_up_stops_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadline: float, reserve: float
) -> None:
    monkeypatch.setattr("tl_backend.tuner.admission.RESERVE", reserve)
    found, _, _ = search(tmp_path, plan(faults=(planted.FINE,)), deadline=deadline)
    assert not any(result.complete or result.finals for result in found.kinds.values())


def test_a_default_that_is_wrong_ends_its_kind(tmp_path: Path) -> None:
    what = plan(faults=(planted.WRONG, planted.FINE))
    decodes = {"candidates": {"decode": what.candidates["decode"]}, "cases": {"decode": what.cases["decode"]}}
    found, _, _ = search(tmp_path, replace(what, **decodes))
    assert "relative RMS" in str(found.kinds["decode"].error)
    assert found.failed
    assert not found.kinds["decode"].complete


def test_a_default_that_failed_is_tried_again(tmp_path: Path) -> None:
    """A compiler that was missing, or a full disk, would else be remembered after it is mended."""
    what = plan(faults=(planted.WRONG,))
    decodes = {"candidates": {"decode": what.candidates["decode"]}, "cases": {"decode": what.cases["decode"]}}
    search(tmp_path, replace(what, **decodes))
    found, _, process = search(tmp_path, replace(what, **decodes))
    assert process.starts == 1
    assert "relative RMS" in str(found.kinds["decode"].error)
