"""The environment's variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tl_backend.errors import InvalidInputError
from tl_backend.settings import Settings


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    settings = Settings.from_env({})
    assert settings == Settings(
        table_dir=Path("/home/somebody/.config/tl-backend/tables"), cache_dir=Path("/home/somebody/.cache/tl-backend")
    )
    assert settings == Settings.from_env({f"TL_BACKEND_{name}": "" for name in ("CPU", "TABLES", "TABLE_DIR")})


def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    env = {"CPU": "1", "LAUNCH_LOG_DIR": "logs", "TABLE_DIR": "~/tables", "TABLES": "0", "CACHE_DIR": "/c"}
    settings = Settings.from_env({f"TL_BACKEND_{name}": value for name, value in env.items()})
    assert settings == Settings(
        cache_dir=Path("/c"),
        names_cache_dir=True,
        cpu=True,
        launch_log_dir="logs",
        table_dir=Path("/home/somebody/tables"),
        tables=False,
    )
    with pytest.raises(
        InvalidInputError, match=r"TL_BACKEND_OTHER; the variables are .*TL_BACKEND_TABLES, TL_BACKEND_TABLE_DIR. Unset"
    ):
        Settings.from_env({"TL_BACKEND_OTHER": "x"})
    with pytest.raises(InvalidInputError, match="TL_BACKEND_TABLES: got 'no'; 0 or 1"):
        Settings.from_env({"TL_BACKEND_TABLES": "no"})


def test_a_user_without_a_home_has_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES.md C4: a user id that no list of users has."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 1000800000)
    assert Settings.from_env({}).table_dir is None
    assert Settings.from_env({"TL_BACKEND_TABLE_DIR": "/tables"}).table_dir == Path("/tables")
