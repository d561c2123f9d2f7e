"""A doctor's report: rows, and checks that cannot bring each other down."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from tl_backend.errors import TLBackendError

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row.

    Attributes:
        check: what was looked at.
        state: "problem" where vLLM would not serve with this backend, "warning" where it would serve otherwise than
            meant.
        value: what was found.
        remedy: what to do; empty where all is well.
    """

    check: str
    state: State
    value: str
    remedy: str = ""


def ok(check: str, value: object) -> Finding:
    """All is well."""
    return Finding(check=check, state="ok", value=str(value))


def warning(check: str, value: object, remedy: str) -> Finding:
    """It serves, otherwise than meant."""
    return Finding(check=check, state="warning", value=str(value), remedy=remedy)


def problem(check: str, value: object, remedy: str = "") -> Finding:
    """It does not serve. A message of this package has its remedy in the value."""
    return Finding(check=check, state="problem", value=str(value), remedy=remedy)


Check = Callable[[], Iterable[Finding]]


def run_checks(checks: Iterable[tuple[str, Check]]) -> list[Finding]:
    """The rows of all checks. One that raises becomes a row."""
    return [row for name, check in checks for row in _rows_of(name, check)]


def _rows_of(name: str, check: Check) -> list[Finding]:
    try:
        return list(check())
    except TLBackendError as error:
        return [problem(name, error)]
    except ModuleNotFoundError as error:
        return [problem(name, f"needs {error.name}, which is not installed", "See the rows on what is installed.")]
    except Exception as error:  # noqa: BLE001
        return [problem(name, f"the check failed: {type(error).__name__}: {error}", "Please report this.")]
