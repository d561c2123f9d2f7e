"""Every ``TL_BACKEND_*`` environment variable, in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tl_backend.errors import InvalidInputError, describe

PREFIX = "TL_BACKEND_"
DEFAULT_TABLE_DIR = "~/.config/tl-backend/tables"
DEFAULT_CACHE_DIR = "~/.cache/tl-backend"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the environment asks for.

    Attributes:
        cache_dir: ``TL_BACKEND_CACHE_DIR`` (a folder): compiled kernels; and TileLang's own cache, unless
            ``TILELANG_CACHE_DIR`` says where that is. Ranks, servers and restarts may share it. Default
            ~/.cache/tl-backend; None where there is no home.
        names_cache_dir: whether the variable is set: then no other folder will do.
        cpu: ``TL_BACKEND_CPU`` (0 or 1): on vLLM's CPU platform, replace the built-in backend by this one, compiled for
            TileLang's C target. For laptops and CI. Default 0.
        launch_log_dir: ``TL_BACKEND_LAUNCH_LOG_DIR`` (a folder): each process writes the kernels that it launched, how
            often, and the tables' rows that served them to one JSON file there, every second and at exit. Default:
            nothing is written.
        table_dir: ``TL_BACKEND_TABLE_DIR`` (a folder): the user's tuned tables, which come before the shipped ones.
            Default ~/.config/tl-backend/tables; None where there is no home.
        tables: ``TL_BACKEND_TABLES`` (0 or 1): 0 reads no table, so that every launch takes its family's default: to
            compare, or to be rid of a bad row. Default 1.
    """

    cache_dir: Path | None = None
    names_cache_dir: bool = False
    cpu: bool = False
    launch_log_dir: str | None = None
    table_dir: Path | None = None
    tables: bool = True

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables.

        Raises:
            InvalidInputError: a variable is malformed, or its name is not one of those above (a typo would go unseen).
        """
        known = {f"{PREFIX}{name}" for name in ("CACHE_DIR", "CPU", "LAUNCH_LOG_DIR", "TABLE_DIR", "TABLES")}
        for name in sorted(env):
            if name.startswith(PREFIX) and name not in known:
                raise InvalidInputError(
                    describe(
                        "environment variable",
                        value=name,
                        limit=f"the variables are {', '.join(sorted(known))}",
                        remedy=f"Unset {name} or correct its name.",
                    )
                )
        named = env.get(f"{PREFIX}CACHE_DIR") or None
        return cls(
            cache_dir=_folder(named or DEFAULT_CACHE_DIR),
            names_cache_dir=named is not None,
            cpu=_flag(env, f"{PREFIX}CPU", default="0"),
            launch_log_dir=env.get(f"{PREFIX}LAUNCH_LOG_DIR") or None,
            table_dir=_folder(env.get(f"{PREFIX}TABLE_DIR") or DEFAULT_TABLE_DIR),
            tables=_flag(env, f"{PREFIX}TABLES", default="1"),
        )


def _folder(name: str) -> Path | None:
    folder = os.path.expanduser(name)  # noqa: PTH111
    return None if folder.startswith("~") else Path(folder)  # A user id without a home keeps the "~".


def _flag(env: Mapping[str, str], name: str, *, default: str) -> bool:
    value = env.get(name) or default
    if value not in ("0", "1"):
        raise InvalidInputError(describe(name, value=repr(value), limit="0 or 1", remedy=f"Set {name}=1 or unset it."))
    return value == "1"
