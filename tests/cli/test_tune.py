"""``tl-backend tune``: a whole search on the C target, what it would do elsewhere, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tl_backend.cli.app import app
from tl_backend.configs.choice import default_config
from tl_backend.configs.lookup import Tables
from tl_backend.configs.regime import Regime
from tl_backend.configs.space import Space, tile_of
from tl_backend.device import DeviceSpec
from tl_backend.testing.cases import make_problem
from tl_backend.tuner.regimes import Case

CPU = DeviceSpec.absent("c")
SPECS = ["--problem", "2/1,D32,page16,float32", "--problem", "4/2,D32,page16,float32"]


def run(*arguments: str):
    return CliRunner().invoke(app, ["tune", *arguments])


def small_space(kind, problem, device) -> Space:
    default = default_config(kind, problem, device)
    tile = replace(tile_of(default), block_n=16)
    return Space(kept=(default, tile if kind == "prefill" else replace(default, tile=tile)), pruned=())


def small_cases(kind, problem, device, *, memory_bytes=None) -> tuple[Case, ...]:
    phase, query_len, seq_len = ("decode", 1, 60) if kind == "decode" else ("prefill", 20, 20)
    regime = Regime.of(phase=phase, query_len=query_len, context_len=seq_len, num_requests=2)
    return (Case(regime=regime, query_len=query_len, seq_len=seq_len, num_requests=2),)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Searches of two candidates in one case; returns the folder of tables."""
    monkeypatch.setenv("TL_BACKEND_TABLE_DIR", str(tmp_path / "tables"))
    monkeypatch.setattr("tl_backend.tuner.tune.space", small_space)
    monkeypatch.setattr("tl_backend.tuner.anchors.space", small_space)
    monkeypatch.setattr("tl_backend.tuner.tune.cases", small_cases)
    return tmp_path / "tables"


def test_a_search_becomes_the_active_table_and_is_not_done_twice(small: Path) -> None:
    answer = run(*SPECS, "--promote", "--json", "--processes", "1")
    assert answer.exit_code == 0, answer.output
    document = json.loads(answer.stdout)
    assert [problem["anchor"] for problem in document["problems"]] == [True, False]
    for problem in document["problems"]:
        assert len(problem["rows"]) + len(problem["settled"]) == 2
        assert problem["open"] == []
        assert all(kind["complete"] and not kind["refused"] for kind in problem["kinds"].values())
    assert len(document["geomean_by_regime"]) == 2
    assert (document["table"], document["active"]) == ("cpu generation 1", True)

    tables = Tables.load(CPU, small)
    rows = {row["regime"]["phase"] for row in document["problems"][0]["rows"]}
    chooser = tables.chooser(make_problem(2, 1, 32, 16))
    for phase, query_len in (("prefill", 20), ("decode", 1)):
        regime = Regime.of(phase=phase, query_len=query_len, context_len=60, num_requests=2)
        source = chooser.choose(regime).source
        assert "cpu generation 1" in source
        assert source.startswith("family default") == (phase not in rows)

    once_more = run(*SPECS, "--json")
    assert once_more.exit_code == 0, once_more.output
    found = json.loads(once_more.stdout)
    assert (found["problems"], found["table"]) == ([], None)
    assert "Everything was there" in found["note"]
    assert once_more.stderr.count("all 2 entries are there") == 2

    again = run(*SPECS, "--out", str(small / "file.json"))
    assert again.exit_code == 0, again.output
    assert "4 known from before" in again.stderr
    assert "0 compiled" in again.stderr
    assert (small / "file.json").exists()


def test_a_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TL_BACKEND_TABLE_DIR", "/dev/null/tables")
    answer = run("--problem", "4/2,D32,page16,float32")
    assert answer.exit_code == 2
    assert "folder of tables /dev/null/tables" in answer.stderr
    assert "Set TL_BACKEND_TABLE_DIR" in answer.stderr


def test_a_dry_run_says_what_would_be_searched_on_any_device() -> None:
    answer = run(
        "--problem",
        "32/8,D128,page16,bf16",
        "--problem",
        "28/4,D128,page16,bf16",
        "--dry-run",
        "--arch",
        "sm_90",
        "--json",
    )
    assert answer.exit_code == 0, answer.output
    document = json.loads(answer.stdout)
    prefill, decode, other = document["searches"]
    assert (prefill["kind"], decode["kind"], other["anchor"]) == ("prefill", "decode", False)
    # Decodes that differ in their blocks share kernels: one that writes the output, one for pieces, and one combine.
    assert decode["kernels"] < decode["candidates"]
    assert document["kernels"] == prefill["kernels"] + decode["kernels"]
    assert document["compile_seconds"] > 0


def test_a_dry_run_can_explain_the_space() -> None:
    what = ("--problem", "32/8,D128,page16,bf16", "--dry-run", "--arch", "sm_90", "--explain")
    answer = run(*what)
    assert answer.exit_code == 0, answer.output
    assert "pruned" in answer.stdout
    assert "by registers, such as" in answer.stdout
    (text,) = json.loads(run(*what, "--json").stdout)["spaces"]
    assert text in answer.stdout
    refused = run("--problem", "32/8,D128,page16,bf16", "--explain")
    assert refused.exit_code == 2
    assert "Add --dry-run." in refused.stderr


def test_a_dry_run_can_generate_all_code(small: Path) -> None:
    what = ("--problem", "8/2,D64,page16,fp16", "--kind", "prefill")
    answer = run(*what, "--dry-run", "--compile", "--arch", "gfx942", "--processes", "1")
    assert answer.exit_code == 0, answer.output
    assert "Code was generated for 2 of them." in answer.stdout


def test_a_models_config_names_its_problems(tmp_path: Path) -> None:
    config = {"num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584, "model_type": "qwen2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = run(
        "--model",
        str(tmp_path / "config.json"),
        "--tp",
        "2",
        "--dry-run",
        "--arch",
        "gfx90a",
        "--kind",
        "decode",
        "--json",
    )
    assert answer.exit_code == 0, answer.output
    (search,) = json.loads(answer.stdout)["searches"]
    assert (search["problem"], search["kind"]) == ("14/2,D128,page16,bfloat16", "decode")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--problem"),
        (["--all", "--problem", "2/1,D32,page16,float32"], "one of them"),
        (["--problem", "2/1,D32"], "page16"),
        (["--all", "--kind", "both"], "--kind"),
        (["--all", "--arch", "sm_90"], "--dry-run"),
        (["--all", "--compile"], "--dry-run"),
        (["--all", "--promote", "--out", "x"], "--promote"),
        (["--all", "--promote", "--dry-run"], "--promote"),
        (["--model", "/nowhere/config.json"], "--model"),
        (["--problem", "32/8,D128,page16,bf16"], "bfloat16"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("TL_BACKEND_TABLE_DIR", str(tmp_path))
    answer = run(*arguments)
    assert answer.exit_code == 2
    assert says in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


def test_a_model_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    assert run("--model", str(tmp_path / "config.json")).exit_code == 2
