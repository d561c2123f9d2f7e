"""The acceptance kit, reduced to what a CPU does in a minute; its file is valid whatever happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tl_backend.cli import acceptance, acceptance_worker
from tl_backend.cli.acceptance import Report, accept
from tl_backend.cli.acceptance_plan import Plan, kernels_of, plan_for
from tl_backend.cli.acceptance_worker import Check, Measure, Worker
from tl_backend.cli.app import app
from tl_backend.cli.doctor_rows import ok
from tl_backend.configs.identity import device_identity
from tl_backend.configs.table import parse_table
from tl_backend.configs.words import parse_problem
from tl_backend.device import DeviceSpec
from tl_backend.errors import UnsupportedError
from tl_backend.measure.workload import Workload
from tl_backend.ops.child import ChildLostError
from tl_backend.problem import SUPPORTED_HEAD_DIMS
from tl_backend.testing import poison
from tl_backend.testing.cases import Case
from tl_backend.testing.problems import Work
from tl_backend.tuner import tune

CPU = DeviceSpec.absent("c")
PROBLEM = parse_problem("2/1,D32,page16,float32")
WORK = Work(problem=PROBLEM, cases=(Case(query_lens=(1, 5), seq_lens=(20, 9)),), kinds=("prefill", "decode"))
WORKLOAD = Workload(name="tiny", problem=PROBLEM, query_lens=(16,), seq_lens=(16,))
TINY = Plan(work=(WORK, WORK), tuned=(PROBLEM,), workloads=(WORKLOAD,))
QUIET = Console(quiet=True)
ROW = {"problem": "tiny", "failures": [], "error": 1e-6, "tolerance": 1e-5}
MEASURED = {"name": "tiny", "problems": None, "kernels": {"tilelang": {"us": 10.0}}}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[type, Any]:
    """No process, no compiler and no tuner: the answers, or what is raised, by the type of the request."""
    answers: dict[type, Any] = {Check: ROW, Measure: MEASURED, acceptance.Ceiling: None}

    def ask(self: Worker, request: Any) -> Any:
        answer = answers[type(request)]
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(Worker, "ask", ask)
    monkeypatch.setattr(acceptance, "plan_for", lambda device: TINY)
    monkeypatch.setattr(acceptance, "examine", lambda: [ok("Python", "here")])
    monkeypatch.setattr(acceptance, "build_kernels", list)
    monkeypatch.setattr(tune, "tune", lambda problems, device, *_: tune.Result(device=device_identity(device)))
    return answers


def run(path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    answer = CliRunner().invoke(app, ["doctor", "--acceptance", str(path), *arguments])
    return answer.exit_code, json.loads(path.read_text())


def test_the_whole_kit_on_a_cpu(tmp_path: Path) -> None:
    report = accept(tmp_path / "cpu.json", CPU, QUIET, budget_s=3600, plan=TINY)
    found = json.loads((tmp_path / "cpu.json").read_text())
    assert (found["state"], found["errors"], report.has_failed) == ("complete", {}, False)
    assert found["identity"]["name"] == "cpu"
    assert found["environment"]["torch"] == torch.__version__
    assert {row["check"] for row in found["doctor"]} > {"Python", "compiler", "outcome"}
    assert [row["failures"] for row in found["correctness"]["rows"]] == [[], []]
    assert 0 < found["correctness"]["rows"][0]["error"] <= found["correctness"]["rows"][0]["tolerance"]
    table = found["tuning"]["table"]
    assert parse_table(json.dumps(table).encode(), "the file's").device.name == "cpu"
    assert len(table["rows"]) + len(table["settled"]) > 0
    (row,) = found["benchmark"]["rows"]
    assert row["problems"] is None
    assert row["kernels"]["tilelang"]["us"] > 0
    assert found["benchmark"]["ceilings"]["matmul_tflops"] > 0
    assert not list(tmp_path.glob("*.partial"))


def test_a_good_run_is_said_to_be_complete(tmp_path: Path, scripted) -> None:
    code, found = run(tmp_path / "a.json")
    assert (code, found["state"]) == (0, "complete")
    assert found["finished"] is not None


def test_interrupting_leaves_a_file_that_says_so(tmp_path: Path, scripted) -> None:
    scripted[Check] = [ROW, KeyboardInterrupt()]
    code, found = run(tmp_path / "a.json")
    assert (code, found["state"]) == (130, "interrupted in correctness")
    assert len(found["correctness"]["rows"]) == 1
    assert found["doctor"]
    assert found["finished"] is None


def test_a_lost_process_costs_its_row(tmp_path: Path, scripted) -> None:
    scripted[Check] = [ChildLostError("killed by SIGSEGV"), ROW]
    scripted[Measure] = ChildLostError("no answer within 600 s; killed")
    code, found = run(tmp_path / "a.json")
    assert (code, found["state"]) == (1, "complete")
    assert found["correctness"]["rows"][0]["failures"] == ["process: killed by SIGSEGV"]
    assert found["correctness"]["rows"][1] == ROW
    assert found["benchmark"]["rows"][0]["problems"].startswith("process: no answer")


def test_a_wrong_answer_is_an_exit_code(tmp_path: Path, scripted) -> None:
    scripted[Check] = ROW | {"failures": ["P1: 3 elements are not finite"]}
    assert run(tmp_path / "a.json")[0] == 1


def test_a_stage_that_fails_costs_no_other(tmp_path: Path, scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise UnsupportedError("nothing to tune here")

    monkeypatch.setattr(tune, "tune", fail)
    code, found = run(tmp_path / "a.json")
    assert (code, found["state"]) == (1, "complete")
    assert found["errors"] == {"tuning": "UnsupportedError: nothing to tune here"}
    assert found["benchmark"]["rows"] == [MEASURED]


def test_what_the_budget_leaves_is_listed(tmp_path: Path, scripted) -> None:
    report = accept(tmp_path / "a.json", CPU, QUIET, budget_s=0.0)
    assert report.document["correctness"] == {"rows": [], "left": ["2/1 D32 page16 float32 causal"] * 2}
    assert report.document["tuning"]["left"] == ["2/1,D32,page16,float32"]
    assert report.document["benchmark"]["left"] == ["tiny"]
    assert not report.has_failed


def test_a_process_that_is_lost_is_started_again(tmp_path: Path) -> None:
    with Worker("cpu", tmp_path / "log") as worker:
        with pytest.raises(ChildLostError, match="AttributeError"):
            worker.ask(Check(work=None))  # type: ignore[arg-type]
        assert worker.ask(Check(work=WORK))["failures"] == []


def test_an_error_over_its_limit_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison, "TOLERANCES", {"float32": 1e-12})
    found = acceptance_worker._check(Check(work=WORK), torch.device("cpu"))
    assert len(found["failures"]) == 1
    assert "relative RMS" in found["failures"][0]


def test_a_rehearsal_for_an_absent_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = parse_problem("2/1,D32,page16,float16")
    work = Work(problem=problem, cases=WORK.cases, kinds=("prefill",))
    monkeypatch.setattr(acceptance, "plan_for", lambda device: Plan(work=(work,), tuned=(problem,), workloads=()))
    monkeypatch.setattr(acceptance, "examine", lambda: [ok("Python", "here")])
    code, found = run(tmp_path / "a.json", "--dry-run", "--arch", "gfx942")
    assert (code, found["state"], found["dry_run"]) == (0, "complete", True)
    assert found["device"]["arch"] == "gfx942"
    assert found["code"] == {"kernels": 1, "failed": {}}
    assert found["plan"]["candidates"]["2/1,D32,page16,float16"]["prefill"] > 1
    assert "correctness" not in found


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx90a", "gfx942", "gfx950", "c"])
def test_plans_are_bounded_and_can_be_had_on_every_device(arch: str) -> None:
    device = DeviceSpec.absent(arch)
    plan = plan_for(device)
    assert all(kernels_of(work, device) for work in plan.work)
    assert plan.tuned
    assert plan.workloads
    # Minutes of a node: 63 since the sweep has problems of each of the head sizes of Hopper's prefill.
    assert len(plan.work) <= 64
    if device.is_gpu:
        assert {work.problem.head_dim for work in plan.work} == set(SUPPORTED_HEAD_DIMS)
        assert {kind for work in plan.work for kind in work.kinds} >= {"prefill", "decode", "decode_split"}
        assert any(work.problem.is_quantized for work in plan.work)
        assert any(not work.problem.is_paged for work in plan.work)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dry-run",), "--dry-run: got no --acceptance"),
        (("--budget", "60"), "--budget: got no --acceptance"),
        (("--acceptance", "a.json", "--arch", "sm_90"), "kernels run on this machine's device"),
        (("--acceptance", "/no/such/folder/a.json"), "it must be a file that can be written"),
    ],
)
def test_bad_usage(arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer = CliRunner().invoke(app, ["doctor", *arguments])
    assert (answer.exit_code, answer.stdout) == (2, "")
    assert message in answer.stderr


def test_the_file_is_replaced_and_never_written_into(tmp_path: Path) -> None:
    report = Report(tmp_path / "a.json", CPU)
    before = (tmp_path / "a.json").stat().st_ino
    report.document["errors"]["x"] = object()
    with pytest.raises(TypeError):
        report.write()
    assert json.loads((tmp_path / "a.json").read_text())["errors"] == {}
    assert (tmp_path / "a.json").stat().st_ino == before
