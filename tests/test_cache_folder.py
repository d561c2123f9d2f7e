"""Where kernels are kept, whoever the user is."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tl_backend import cache_folder as module
from tl_backend.cache_folder import TILELANG_VARIABLE, cache_folder, share_with_tilelang
from tl_backend.errors import EnvironmentProblemError

VARIABLE = "TL_BACKEND_CACHE_DIR"


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home and a folder of temporary files of the test's own."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    module._temporary_folder.cache_clear()
    module._can_be_written.cache_clear()


def temporary(tmp_path: Path) -> Path:
    return tmp_path / "tmp" / f"tl-backend-{os.getuid()}"


def test_the_home_is_the_default_and_a_variable_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == tmp_path / "home" / ".cache" / "tl-backend"
    monkeypatch.setenv(VARIABLE, "/dev/null/nowhere")  # As it is: the store says what is wrong with it.
    assert cache_folder() == Path("/dev/null/nowhere")
    monkeypatch.setenv(VARIABLE, "kernels")
    monkeypatch.chdir(tmp_path)
    assert cache_folder() == tmp_path / "kernels"
    monkeypatch.setenv(VARIABLE, "~/kernels")
    assert cache_folder() == tmp_path / "home" / "kernels"


@pytest.mark.parametrize("home", ["/dev/null", "/proc/1", "read-only"])
def test_a_home_that_cannot_be_written_is_replaced_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, home: str
) -> None:
    """CASES.md C4: any user id, HOME=/ or read-only."""
    if home == "read-only":  # Or another user's. Whoever runs tests as root may write anywhere.
        mkdir = Path.mkdir

        def refuse(self: Path, *arguments: Any, **named: Any) -> None:
            if self.is_relative_to(tmp_path / "home"):
                raise PermissionError(13, "Permission denied")
            mkdir(self, *arguments, **named)

        monkeypatch.setattr(Path, "mkdir", refuse)
    else:
        monkeypatch.setenv("HOME", home)
    with caplog.at_level("WARNING", module.logger.name):
        assert cache_folder() == temporary(tmp_path)
        assert cache_folder() == temporary(tmp_path)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("cannot be written: set TL_BACKEND_CACHE_DIR to keep them.")
    assert temporary(tmp_path).stat().st_mode & 0o777 == 0o700


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # As where the user's number has no entry.
    assert cache_folder() == temporary(tmp_path)


@pytest.mark.parametrize("fault", ["writable", "link", "foreign", "file"])
def test_a_temporary_folder_that_others_may_fill_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A library is code: it is loaded from no folder that somebody else has prepared."""
    monkeypatch.setenv("HOME", "/dev/null")
    folder = temporary(tmp_path)
    if fault == "file":
        folder.touch()
    elif fault == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777 if fault == "writable" else 0o700)
    if fault == "foreign":
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        folder.rename(folder.with_name(f"tl-backend-{user + 1}"))
    with pytest.raises(EnvironmentProblemError, match="Set TL_BACKEND_CACHE_DIR to a folder of your own"):
        cache_folder()


def test_tilelang_keeps_its_cache_there_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tilelang", raising=False)
    monkeypatch.setenv(TILELANG_VARIABLE, "/elsewhere")
    share_with_tilelang()
    assert os.environ[TILELANG_VARIABLE] == "/elsewhere"
    monkeypatch.setenv(TILELANG_VARIABLE, "")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    share_with_tilelang()
    assert os.environ[TILELANG_VARIABLE] == f"{tmp_path}/tilelang"


def test_tilelang_that_is_here_already_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tilelang", sys)
    monkeypatch.setenv(TILELANG_VARIABLE, "")
    share_with_tilelang()
    assert os.environ[TILELANG_VARIABLE] == ""
