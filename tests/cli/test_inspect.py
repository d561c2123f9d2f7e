"""``tl-backend inspect`` for every target, on a machine that has none of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tl_backend.cli.app import app

TARGETS = ("sm_80", "sm_90", "gfx90a", "gfx942", "gfx950", "c")
MATRIX = {"sm_80": "mma", "sm_90": "wgmma", "gfx90a": "mfma", "gfx942": "mfma", "gfx950": "mfma", "c": None}


def run(*arguments: str):
    return CliRunner().invoke(app, ["inspect", "--no-compile", *arguments])


@pytest.mark.parametrize("arch", TARGETS)
def test_prefill_of_every_target(arch: str) -> None:
    problem = f"8/2,D64,page16,{'float32' if arch == 'c' else 'float16'}"
    answer = run("--kernel", "prefill", "--arch", arch, "--problem", problem, "--json")
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    counts = {name: found["code"][name] for name in ("wgmma", "mma", "mfma")}
    assert [name for name, count in counts.items() if count] == [MATRIX[arch]] * (arch != "c")
    assert found["code"]["narrow_offsets"] == []
    assert found["device"]["arch"] == arch
    if arch != "c":
        assert 0 < found["shared_memory"] <= found["expected_shared_memory"]
        assert found["occupancy"]["blocks"] >= 1


@pytest.mark.parametrize(
    ("kernel", "arch"),
    [("decode", "sm_90"), ("decode_combine", "gfx942"), ("cache_write", "sm_80"), ("merge", "gfx950"), ("merge", "c")],
)
def test_every_kernel(kernel: str, arch: str) -> None:
    answer = run("--kernel", kernel, "--arch", arch)
    assert answer.exit_code == 0, answer.output
    assert f"{kernel}, " in answer.stdout


def test_the_source_goes_to_a_file_or_alone_to_stdout(tmp_path: Path) -> None:
    arguments = ("--kernel", "merge", "--arch", "sm_90")
    assert run(*arguments, "--source", str(tmp_path / "merge.cu")).exit_code == 0
    answer = run(*arguments, "--source", "-")
    assert answer.stdout.strip() == (tmp_path / "merge.cu").read_text().strip()
    assert "__global__" in answer.stdout
    assert "merge, " in answer.stderr


def test_a_config_replaces_fields_of_the_default() -> None:
    answer = run("--kernel", "prefill", "--arch", "sm_80", "--config", '{"block_n": 32}', "--json")
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert (found["config"]["block_n"], found["config"]["block_m"]) == (32, 128)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kernel", "prefil"), "--kernel: got prefil; one of prefill"),
        (("--kernel", "prefill", "--arch", "sm_70"), "--arch: got sm_70"),
        (("--kernel", "prefill", "--problem", "32/8"), "it has no head_dim"),
        (
            ("--kernel", "prefill", "--problem", "8/8,D64,page16,fp32"),
            "got float32; dtypes that run there: float16, bfloat16",
        ),
        (("--kernel", "decode", "--problem", "8/8,D64,contiguous,fp16"), "decode is for a cache"),
        (("--kernel", "prefill_hopper", "--problem", "8/8,D80,page16,fp16"), "none, since head size 80; 64, 96,"),
        (("--kernel", "prefill_combine", "--arch", "sm_80"), "none, since sm_80 is no Hopper"),
        (("--kernel", "prefill_hopper", "--config", '{"block_m": 128}'), "the fields are block_n (int), warpgroups"),
        (("--kernel", "prefill_hopper", "--config", '{"num_stages": 9}'), "bytes of shared memory; sm_90 has"),
        (("--kernel", "prefill_combine", "--config", '{"threads": 64}'), "prefill_combine has no choices"),
        (("--kernel", "prefill", "--config", "{"), "it must be a JSON object"),
        (("--kernel", "prefill", "--config", '{"block_k": 3}'), "block_k = 3; the fields are block_m (int)"),
        (("--kernel", "prefill", "--config", '{"block_m": "64"}'), "block_m = '64'"),
        (("--kernel", "prefill", "--config", '{"block_m": 24}'), "not a multiple of 16"),
        (("--kernel", "prefill", "--config", '{"block_n": 0}'), "not a multiple of 16"),
        (("--kernel", "prefill", "--config", '{"threads": 7}', "--arch", "sm_80"), "must generate its code for sm_80"),
        (("--kernel", "merge", "--config", '{"threads": 64}'), "merge has no choices"),
        (("--kernel", "merge", "--source", "-", "--json"), "stdout takes one of them"),
        (("--kernel", "merge", "--source", "/no/such/folder/x"), "it must be a file that can be written"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    arch = () if "--arch" in arguments else ("--arch", "sm_90")
    answer = run(*arguments, *arch)
    assert answer.exit_code == 2
    assert message in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_json_is_alone_on_stdout() -> None:
    """TileLang prints its warnings from C++, past Python's streams."""
    command = [
        sys.executable,
        "-m",
        "tl_backend.cli",
        "inspect",
        "--kernel",
        "prefill",
        "--arch",
        "sm_90",
        "--no-compile",
    ]
    answer = subprocess.run(
        [*command, "--problem", "32/8,D128,page128,bfloat16", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(answer.stdout)["code"]["tma_loads"] == 4


def test_a_field_that_is_tilelangs_choice_by_default_can_be_given() -> None:
    answer = run("--kernel", "prefill", "--arch", "gfx942", "--config", '{"coalesced_width": 4}', "--json")
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["config"]["coalesced_width"] == 4
