"""The one exception tree. Every message carries the value, the limit and the remedy."""

from __future__ import annotations


class TLBackendError(Exception):
    """Base of everything that this package raises on purpose."""


class InvalidInputError(TLBackendError, ValueError):
    """An argument is malformed: wrong dtype, device, shape or stride."""


class UnsupportedError(TLBackendError, NotImplementedError):
    """The request is well-formed, and no kernel here serves it."""


class TableError(TLBackendError, ValueError):
    """A table's file is malformed, unreadable, or another device's."""


class EnvironmentProblemError(TLBackendError, RuntimeError):
    """Something that must be installed or reachable is not: TileLang, a compiler, a supported vLLM."""


def describe(subject: str, *, value: object, limit: str, remedy: str) -> str:
    """One message in the house form: what, the value seen, the limit, and what to do about it."""
    return f"{subject}: got {value}; {limit}. {remedy}"
