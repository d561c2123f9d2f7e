"""What of ``tests.gpu.sanitize`` holds without a GPU: the launches' answers, and how logs and exit codes are judged."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import launch_all, sanitize
from tests.gpu.launch_all import keys, launches, run_all
from tests.gpu.sanitize import PLANTED, REPORTED, TOOLS, main, options_of, parse, planted_faults_problem, run_limited
from tl_backend.device import DeviceSpec
from tl_backend.ops.compiled import KINDS
from tl_backend.telemetry.launches import counts

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HANDFUL = r"^(gather16, (?!mixed|long)|contiguous window,)"

CLEAN = """========= COMPUTE-SANITIZER
CASE a, prefill
DONE a, prefill
CASE a, decode
DONE a, decode
LAUNCHED 2 of 2 cases
========= ERROR SUMMARY: 0 errors
"""
INVALID = """========= Invalid __global__ write of size 4 bytes
=========     at decode_kernel_kernel+0x1c0
=========     by thread (7,0,0) in block (0,0,0)
=========     Address 0x7f00a2000404 is out of bounds
"""
RACES = """========= Error: Race reported between Write access at prefill_kernel_kernel+0x{address} [8 hazards]
=========
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a sanitizer that prints a tool's log and exits as told; the others print a clean one."""
    monkeypatch.setattr(sanitize, "load_kernels", lambda *args, **kwargs: {})
    monkeypatch.setattr(sanitize, "launches", lambda device, only="": launches(CPU, "^gather16, (prefill|decode)"))

    def write(says: dict[str, tuple[str, int]]) -> str:
        program = tmp_path / "sanitizer"
        program.write_text(f"""#!{sys.executable}
import json, sys
if "--version" in sys.argv:
    sys.exit(print("Version 2026.4.0.0 (build 1)"))
if "--tool" in sys.argv:
    assert "--check-tensor-ops" not in sys.argv
    says = json.loads({json.dumps(json.dumps(says))})
    log, code = says.get(sys.argv[sys.argv.index("--tool") + 1], ({CLEAN!r}, 0))
    print(log)
    sys.exit(code)
""")
        program.chmod(0o755)
        return str(program)

    return write


def run(program: str, out: Path) -> tuple[int, dict]:
    code = main(["--device", "cpu", "--sanitizer", program, "--out", str(out)])
    return code, json.loads(out.read_text())


def test_every_kind_of_kernel_is_among_the_launches() -> None:
    chosen, device = launches(GPU), DeviceSpec.absent("sm_90")
    assert {key.kind for key in keys(chosen, device)} == set(KINDS)
    assert len({str(launch) for launch in chosen}) == len(chosen) == 115
    problems = {launch.problem for launch in chosen}
    assert {problem.dtype for problem in problems} == {"float16", "bfloat16"}
    assert {problem.kv_dtype for problem in problems if problem.is_quantized} == {"float8_e4m3fn", "float8_e5m2"}


def test_answers_on_the_c_target() -> None:
    """All kinds, also where what must not be read was never written."""
    before = counts()
    chosen = launches(CPU, HANDFUL)
    assert [message for _, message in run_all(chosen, CPU, compare=True) if message] == []
    launched = {kind for kind, count in counts().items() if count > before.get(kind, 0)}
    assert launched == set(KINDS) - {"prefill_hopper", "prefill_combine"}  # These are a Hopper's.
    decode = next(launch for launch in chosen if launch.what == "split decode")
    error = decode.run(CPU, uninitialised=True)
    assert error is not None
    assert error <= 1e-5


def test_a_wrong_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_all, "paged_attention", lambda *args, out, **kwargs: out.fill_(0.5))
    monkeypatch.setattr(launch_all, "paged_cache_write", lambda *args, **kwargs: None)
    chosen = launches(CPU, "^gather16, (decode|cache write)")
    said = [message for _, message in run_all(chosen, CPU, compare=True)]
    assert len(said) == 2
    assert all(message.startswith("relative RMS: got ") for message in said)


def test_launches_that_fail_end_with_1(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def broken(*args, **kwargs):
        raise RuntimeError("an illegal instruction was encountered")

    monkeypatch.setattr(launch_all, "paged_attention", broken)
    assert launch_all.main(["--device", "cpu", "--only", "^gather16, decode"]) == 1
    assert "WRONG gather16, decode RuntimeError: an illegal" in capsys.readouterr().out
    assert launch_all.main(["--device", "cpu", "--only", "^gather16, decode", "--seconds", "-1"]) == 0
    assert capsys.readouterr().out == "LAUNCHED 0 of 1 cases\n"


def test_a_clean_log() -> None:
    result = parse("memcheck", CLEAN, 0, 2)
    assert (result.launched, result.reports, result.ok) == (2, [], True)


@pytest.mark.parametrize(("code", "of"), [(REPORTED, 2), (1, 2), ("out of time", 2), (0, 3)])
def test_a_log_without_reports_is_not_enough(code: int | str, of: int) -> None:
    assert not parse("memcheck", CLEAN, code, of).ok


def test_no_launches_are_no_success() -> None:
    assert not parse("memcheck", "========= COMPUTE-SANITIZER\n", 0, 0).ok


def test_reports_are_counted_by_kind_and_by_launch() -> None:
    races = [RACES.format(address=address) for address in ("7b0", "9f0")]
    first, rest = CLEAN.split("DONE a, decode\n")
    result = parse("racecheck", INVALID + first + races[0] + INVALID + races[1] + "DONE a, decode\n" + rest, 0, 2)
    assert not result.ok
    assert result.launched == 2
    race = "Error: Race reported between Write access at prefill_kernel_kernel+0x... [hazards]"
    invalid = "Invalid __global__ write of size 4 bytes"
    assert {report["kind"]: report["count"] for report in result.reports} == {race: 2, invalid: 2}
    assert {report["kind"]: report["cases"] for report in result.reports} == {
        race: ["a, decode"],
        invalid: ["before the first launch", "a, decode"],
    }
    assert f"2 x {race}, in 1 launches:\n           a, decode" in str(result)


def test_four_clean_tools_end_with_0(stub, tmp_path: Path, capsys) -> None:
    code, written = run(stub({}), tmp_path / "out.json")
    assert code == 0
    assert written["sanitizer"] == "2026.4.0.0"
    assert (written["compared"], written["wrong"]) == (2, {})
    assert {"device", "driver", "torch", "cuda", "tilelang", "date"} <= written.keys()
    assert [tool["tool"] for tool in written["tools"]] == list(TOOLS)
    assert all(
        (tool["exit"], tool["launched"], tool["of"], tool["reports"]) == (0, 2, 2, []) for tool in written["tools"]
    )
    assert (tmp_path / "out.racecheck.log").read_text().startswith(CLEAN)
    assert capsys.readouterr().out.count("\nok ") == 4


@pytest.mark.parametrize("says", [(CLEAN, REPORTED), (CLEAN + INVALID, 0), ("========= COMPUTE-SANITIZER\n", 0)])
def test_one_tool_that_is_not_clean_ends_with_1(says: tuple[str, int], stub, tmp_path: Path) -> None:
    code, written = run(stub({"synccheck": says}), tmp_path / "out.json")
    assert code == 1
    assert [tool["tool"] for tool in written["tools"] if not tool["ok"]] == ["synccheck"]


def test_a_wrong_answer_ends_with_1(stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_all, "paged_attention", lambda *args, out, **kwargs: out.fill_(0.5))
    code, written = run(stub({}), tmp_path / "out.json")
    assert code == 1
    assert set(written["wrong"]) == {"gather16, prefill", "gather16, decode"}


def test_a_tool_that_hangs_is_ended(tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "print('CASE a', flush=True); import time; time.sleep(600)"]
    assert run_limited(sleeper, tmp_path / "log", 2.0, dict(os.environ)) == "out of time"


def test_a_sanitizer_that_misses_planted_faults_is_not_believed(stub) -> None:
    found = {tool: (f"========= Error: {wanted}", REPORTED) for tool, (_, wanted) in PLANTED.items()}
    assert planted_faults_problem(stub(found)) is None
    problem = planted_faults_problem(stub(found | {"racecheck": (CLEAN, REPORTED)}))
    assert problem is not None
    assert problem.startswith("planted faults: got racecheck: ")
    assert problem.endswith(
        ". Name a sanitizer that serves this driver with --sanitizer, and let nvcc compile the faults."
    )
    assert "memcheck" in str(planted_faults_problem(stub({})))


def test_each_tool_has_ports_of_its_own(stub) -> None:
    commands = [options_of(stub({}), tool) for tool in TOOLS]
    assert len({command[command.index("--port") + 1] for command in commands}) == len(TOOLS)


def test_a_missing_sanitizer_is_refused(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--sanitizer", str(tmp_path / "none"), "--out", str(tmp_path / "out.json")])
    said = capsys.readouterr().err
    assert "none; it must be a program. Install" in said
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--only", "no such launch", "--out", str(tmp_path / "out.json")])
    assert "leaves none of" in capsys.readouterr().err
