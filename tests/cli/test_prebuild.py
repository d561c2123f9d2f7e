"""``tl-backend prebuild``: the kernel cache is filled before a server starts."""

from __future__ import annotations

import ctypes.util
import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tl_backend.cli.app import app
from tl_backend.device import DeviceSpec
from tl_backend.ops.compile_pool import Compiled, CompilePool
from tl_backend.ops.driver_stub import linkable_driver
from tl_backend.ops.kernel_store import KernelStore
from tl_backend.ops.prepare import required_kernels
from tl_backend.testing.cases import make_problem

WORD = "4/2,D32,page16,float32"


def run(*arguments: str) -> tuple[int, dict]:
    answer = CliRunner().invoke(app, ["prebuild", *arguments, "--json"])
    return answer.exit_code, json.loads(answer.stdout)


def test_what_a_server_needs_is_there_afterwards(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["prebuild", "--problem", WORD, "--arch", "c", "--out", str(tmp_path)])
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.startswith("5 compiled, 0 were there: ")
    keys = required_kernels(make_problem(4, 2, 32, 16), DeviceSpec.absent("c"))
    assert all(KernelStore(tmp_path).find(key) for key in keys)
    code, found = run("--problem", WORD, "--arch", "c", "--out", str(tmp_path))
    assert code == 0
    assert found == {
        "folder": str(tmp_path),
        "device": "CPU",
        "kernels": 5,
        "compiled": 0,
        "found": 5,
        "failed": {},
    }


def test_a_kernel_that_fails_is_named_and_the_exit_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(self: CompilePool, keys: list) -> None:
        for key in keys:
            self.results.put(Compiled(key, None, "error: no such instruction", 0.0))

    monkeypatch.setattr(CompilePool, "add", add)
    code, found = run("--problem", WORD, "--arch", "c", "--out", str(tmp_path))
    assert (code, found["compiled"], len(found["failed"])) == (1, 0, 5)
    assert set(found["failed"].values()) == {"error: no such instruction"}


def test_what_to_build_has_to_be_said() -> None:
    answer = CliRunner().invoke(app, ["prebuild", "--arch", "c"])
    assert answer.exit_code == 2
    assert "0 of --problem, --model and --all" in answer.stderr


def test_without_a_driver_the_linker_finds_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    monkeypatch.delenv("LIBRARY_PATH", raising=False)
    with linkable_driver(DeviceSpec.absent("sm_90")):
        folder = Path(os.environ["LIBRARY_PATH"])
        assert (folder / "libcuda.so").stat().st_size > 0
    assert "LIBRARY_PATH" not in os.environ
    assert not folder.exists()


@pytest.mark.parametrize("reason", ["another vendor", "a driver", "a stub of CUDA's image", "no C compiler"])
def test_nothing_is_done_where_nothing_is_missing_or_can_be_done(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: "libcuda.so.1" if reason == "a driver" else None)
    monkeypatch.delenv("LIBRARY_PATH", raising=False)
    if reason == "a stub of CUDA's image":
        monkeypatch.setenv("LIBRARY_PATH", "/cuda/stubs")
    if reason == "no C compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    before = os.environ.get("LIBRARY_PATH")
    with linkable_driver(DeviceSpec.absent("gfx942" if reason == "another vendor" else "sm_90")):
        assert os.environ.get("LIBRARY_PATH") == before
