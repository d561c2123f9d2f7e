"""``tl-backend bench`` on a CPU: what it prints, writes, draws and refuses."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tl_backend.cli.app import app
from tl_backend.measure import ceilings, rows

SMALL = ("bench", "--heads", "2", "--head-dim", "32", "--rounds", "2")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "MATMUL_SIZE", {"cpu": 32})
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 4096})


def run(*arguments: str | Path):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def size_of(png: Path) -> tuple[int, int]:
    header = png.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", header[16:24])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run with two lengths wrote."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "MATMUL_SIZE", {"cpu": 32})
        patch.setattr(ceilings, "COPY_BYTES", {"cpu": 4096})
        path = tmp_path_factory.mktemp("bench") / "new" / "out.json"
        result = run(*SMALL, "--seq-lens", "16,33", "--out", path, "--plot", path.with_suffix(".png"))
    assert result.exit_code == 0, result.output
    assert "Attention, B1 H2 D32, float32, causal, contiguous" in result.output
    assert "roofline, matmul: tilelang" in result.output
    assert "not there: fa3: it needs a Hopper GPU" in result.output
    return path


def test_a_file_says_what_was_measured_and_where(measured: Path) -> None:
    found = json.loads(measured.read_text())
    assert [row["name"] for row in found["rows"]] == ["16", "33"]
    for row in found["rows"]:
        assert row["kernels"].keys() == {"tilelang", "sdpa-flash"}
        assert row["error"] < 1e-5
        assert row["problem"]["causal"] is True
    assert found["environment"]["gpu"] == "none"
    assert found["ceilings"]["matmul_tflops"] == max(found["ceilings"]["matmul"].values())


def test_a_plot_is_a_picture(measured: Path) -> None:
    assert size_of(measured.with_suffix(".png")) == (1440, 864)


def test_a_file_is_shown_and_drawn_without_measuring(measured: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(rows, "measure_row", lambda *args, **kwargs: pytest.fail("measured again"))
    plot = tmp_path / "again.png"
    result = run("bench", "--from", measured, "--plot", plot, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"] == json.loads(measured.read_text())["rows"]
    assert size_of(plot) == (1440, 864)


def test_a_decode_of_a_problem_in_one_word() -> None:
    result = run(
        "bench",
        "--problem",
        "4/2,D32,page16,fp32",
        "--decode",
        "--batch",
        "3",
        "--seq-lens",
        "40",
        "--rounds",
        "2",
        "--json",
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["kind"] == "decode"
    assert found["rows"][0]["query_lens"] == [1, 1, 1]
    assert found["rows"][0]["problem"]["num_kv_heads"] == 2


def test_a_wrong_answer_exits_with_1_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows.Answers, "problem_of", lambda self, out: "its answer is off")
    result = run(*SMALL, "--seq-lens", "16")
    assert result.exit_code == 1
    assert "wrong at 16 keys: its answer is off" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seq-lens", "12,x"), "--seq-lens: got '12,x'"),
        (("--seq-lens", "0"), "--seq-lens: got '0'"),
        (("--problem", "4/2,D32,page16,fp32", "--heads", "2"), "--problem: got also --heads"),
        (("--problem", "4/2,D32,contiguous,fp32", "--decode"), "--decode: got contiguous keys"),
        (("--dtype", "bfloat16"), "dtype on CPU: got bfloat16"),
        (("--head-dim", "33"), "head size: got 33"),
        (("--out", "/proc/x/y.json"), "--out: got /proc/x/y.json"),
        (("--out", "/"), "--out: got /"),
        (("--from", "/nothing.json"), "results /nothing.json: got FileNotFoundError"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_exits_with_2_before_anything_is_measured(arguments, said: str, monkeypatch) -> None:
    monkeypatch.setattr(ceilings, "ceilings", lambda *args: pytest.fail("measured"))
    result = run("bench", *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"rows": []}', "\xff"], ids=["empty", "list", "object", "rows", "bytes"]
)
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(text.encode("latin-1"))
    result = run("bench", "--from", path)
    assert result.exit_code == 2
    assert "a file that tl-backend bench --out wrote is needed" in result.stderr


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "matplotlib" else find(name, *args)
    )
    result = run(*SMALL, "--plot", tmp_path / "x.png")
    assert result.exit_code == 2
    assert "tl-backend[plot]" in result.stderr


def test_help_has_an_example() -> None:
    result = run("bench", "--help")
    assert result.exit_code == 0
    assert "tl-backend bench --full --out attention.json --plot attention.png" in result.output
