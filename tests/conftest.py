"""What holds for every test: warnings are errors, the environment asks for nothing, speed decides nothing."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tl_backend.settings import PREFIX, Settings

if TYPE_CHECKING:
    from tl_backend.ops.compiled import KernelCache

# Each with its reason; everything else that warns fails the test.
ALLOWED_WARNINGS = ()


def pytest_configure(config: pytest.Config) -> None:
    for warning in ALLOWED_WARNINGS:
        config.addinivalue_line("filterwarnings", warning)


# A test that has a kernel cache of its own shares TileLang's with the others, whoever imports TileLang first.
os.environ.setdefault("TILELANG_CACHE_DIR", str(Settings.from_env({}).cache_dir or tempfile.gettempdir()) + "/tilelang")

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
def fresh_kernels(monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    """A process that has no kernel yet: the cache that every module finds instead of its own."""
    from tl_backend.ops import compiled

    everybodys, kernels = compiled.KERNELS, compiled.KernelCache()
    for name, module in list(sys.modules.items()):
        if name.startswith("tl_backend.") and getattr(module, "KERNELS", None) is everybodys:
            monkeypatch.setattr(module, "KERNELS", kernels)
    return kernels


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
