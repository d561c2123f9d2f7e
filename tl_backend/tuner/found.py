"""What a search is asked, and what it has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tl_backend.configs.choice import Config
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem
from tl_backend.tuner.halving import DEFAULT
from tl_backend.tuner.regimes import Case
from tl_backend.tuner.select import ranking


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to search. Attributes: candidates, cases: of each kind, "prefill" and "decode"; the default comes first."""

    problem: AttentionProblem
    device: DeviceSpec
    candidates: Mapping[str, tuple[Config, ...]]
    cases: Mapping[str, tuple[Case, ...]]


@dataclass(kw_only=True)
class Found:
    """What a search found for a kind.

    Attributes:
        candidates: all of them; 0 is the default.
        cases: where they are timed.
        refused: why a candidate is out, by index: it did not compile, was wrong, crashed or hung.
        screened: milliseconds by case and candidate, from a few launches.
        finals: paired samples by case; of finished cases alone.
        complete: whether every candidate was tried.
        error: why nothing could be timed, or None.
    """

    candidates: tuple[Config, ...]
    cases: tuple[Case, ...]
    refused: dict[int, str] = field(default_factory=dict)
    screened: dict[Case, dict[int, float]] = field(default_factory=dict)
    finals: dict[Case, dict[int, list[float]]] = field(default_factory=dict)
    complete: bool = False
    error: str | None = None

    def finalists(self, limit: int) -> tuple[Config, ...]:
        """The default, and the candidates that are best over all cases."""
        return tuple(self.candidates[index] for index in (DEFAULT, *ranking(self.screened, limit)))


@dataclass(kw_only=True)
class Outcome:
    """Attributes: kinds: by name; measuring_s: seconds that the device process was busy; seconds: of the search."""

    problem: AttentionProblem
    kinds: dict[str, Found]
    measuring_s: float = 0.0
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether not even the defaults could be timed."""
        return all(found.error is not None for found in self.kinds.values())
