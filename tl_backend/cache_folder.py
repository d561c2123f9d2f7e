"""Where compiled kernels are kept: ``TL_BACKEND_CACHE_DIR``, and what stands in for it where there is no home."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import sys
import tempfile
from pathlib import Path

from tl_backend.errors import EnvironmentProblemError, describe
from tl_backend.settings import Settings

TILELANG_VARIABLE = "TILELANG_CACHE_DIR"

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM formats and shows only loggers below its own.


def cache_folder() -> Path:
    """The folder of the kernel cache, which need not be there yet.

    ``TL_BACKEND_CACHE_DIR``, whatever it is; else ~/.cache/tl-backend where that can be written; else, since containers
    run under any user, a folder of this user's own among the temporary files, named in the log.

    Raises:
        EnvironmentProblemError: there is none: the last one belongs to another user.
        InvalidInputError: a ``TL_BACKEND_*`` variable is malformed.
    """
    settings = Settings.from_env()
    home = settings.cache_dir
    if home is not None and (settings.names_cache_dir or _can_be_written(home)):
        return home.absolute()
    return _temporary_folder(home)


def tilelang_folder() -> Path:
    """Where TileLang's own cache is: ``TILELANG_CACHE_DIR``, or in ``cache_folder()``; raises as that."""
    named = os.environ.get(TILELANG_VARIABLE)
    return Path(named).expanduser().absolute() if named else cache_folder() / "tilelang"


def share_with_tilelang() -> None:
    """Have TileLang keep its cache there, if it is not in this process already."""
    if "tilelang" not in sys.modules and not os.environ.get(TILELANG_VARIABLE):
        os.environ[TILELANG_VARIABLE] = str(tilelang_folder())


@functools.cache
def _temporary_folder(home: Path | None) -> Path:
    folder = Path(tempfile.gettempdir()) / f"tl-backend-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise EnvironmentProblemError(
            describe(
                f"kernel cache {folder}",
                value=f"of user {status.st_uid}, mode {stat.filemode(status.st_mode)}",
                limit="libraries are loaded from there: it has to be this user's alone",
                remedy="Set TL_BACKEND_CACHE_DIR to a folder of your own.",
            )
        )
    where = f"{home} cannot be written" if home is not None else "this user has no home"
    logger.warning("TileLang kernels are kept in %s, since %s: set TL_BACKEND_CACHE_DIR to keep them.", folder, where)
    return folder


@functools.cache
def _can_be_written(folder: Path) -> bool:
    """Tried, not asked: a network's file system may say yes and refuse."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
