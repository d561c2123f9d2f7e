"""What holds for every test: warnings are errors, the environment asks for nothing, speed decides nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

from tl_backend.settings import PREFIX

# Each with its reason; everything else that warns fails the test.
ALLOWED_WARNINGS = ()


def pytest_configure(config: pytest.Config) -> None:
    for warning in ALLOWED_WARNINGS:
        config.addinivalue_line("filterwarnings", warning)


# No test depends on timing, and a failure is the same on every machine.
settings.register_profile("tl_backend", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("tl_backend")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests start without any ``TL_BACKEND_*`` variable but one: the tables of whoever runs them are not read."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(f"{PREFIX}TABLE_DIR", os.devnull + "/tables")


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes ``vllm serve`` the stand-in of testing/fake_vllm.py; returns the monkeypatch, to set its variables."""
    package = tmp_path / "fake" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    shutil.copy(Path(__file__).parent / "testing" / "fake_vllm.py", package / "main.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    return monkeypatch
