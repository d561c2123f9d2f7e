"""Every ``TL_BACKEND_*`` environment variable, in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tl_backend.errors import InvalidInputError, describe

PREFIX = "TL_BACKEND_"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the environment asks for.

    Attributes:
        cpu: ``TL_BACKEND_CPU`` (0 or 1): on vLLM's CPU platform, replace the built-in backend by this one, compiled for
            TileLang's C target. For laptops and CI. Default 0.
        launch_log_dir: ``TL_BACKEND_LAUNCH_LOG_DIR`` (a folder): each process writes the kernels that it launched and
            how often to one JSON file there, every second and at exit. Default: nothing is written.
    """

    cpu: bool = False
    launch_log_dir: str | None = None

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables.

        Raises:
            InvalidInputError: a variable is malformed, or its name is not one of those above (a typo would go unseen).
        """
        known = {f"{PREFIX}CPU", f"{PREFIX}LAUNCH_LOG_DIR"}
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
        return cls(cpu=_flag(env, f"{PREFIX}CPU"), launch_log_dir=env.get(f"{PREFIX}LAUNCH_LOG_DIR") or None)


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "0")
    if value not in ("0", "1", ""):
        raise InvalidInputError(describe(name, value=repr(value), limit="0 or 1", remedy=f"Set {name}=1 or unset it."))
    return value == "1"
