"""Comparisons: launches take turns, and are repeated until ratios are settled or a limit is met."""

import pytest
import torch

from tl_backend.measure import timing
from tl_backend.measure.timing import compare, ratio

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch):
    """Times of launches by name, a round each, instead of a clock's."""
    calls = []

    def give(**times):
        def time_ms(launches, device, *, rounds, warmup, cold):
            calls.append((rounds, warmup))
            return {name: [times[name](round_) for round_ in range(rounds)] for name in launches}

        monkeypatch.setattr(timing, "time_ms", time_ms)
        return calls

    return give


def launches(*names: str):
    return dict.fromkeys(names, lambda: None)


def test_a_steady_ratio_is_settled_at_once(clock) -> None:
    calls = clock(own=lambda r: 2.0, peer=lambda r: 3.0)
    found = compare("own", launches("own", "peer"), CPU, rounds=31, max_rounds=310)
    assert found.ratios == {"peer": {"median": 1.5, "low": 1.5, "high": 1.5}}
    assert found.is_settled
    assert calls == [(31, timing.WARMUP)]


def test_a_noisy_ratio_is_measured_to_the_limit_and_said_to_be_unsettled(clock) -> None:
    calls = clock(own=lambda r: 2.0, peer=lambda r: 2.0 + r % 2)
    found = compare("own", launches("own", "peer"), CPU, rounds=10, max_rounds=40)
    assert not found.is_settled
    assert len(found.times["own"]) == len(found.times["peer"]) == 40
    assert calls == [(10, timing.WARMUP), (10, 0), (10, 0), (10, 0)]


def test_without_peers_one_pass_is_enough(clock) -> None:
    calls = clock(own=lambda r: 1.0)
    found = compare("own", launches("own"), CPU)
    assert found.ratios == {}
    assert len(calls) == 1


def test_a_ratio_above_one_says_that_the_candidate_is_faster() -> None:
    found = ratio([1.0] * 31, [2.0] * 15 + [2.2] * 16)
    assert (found["low"], found["median"], found["high"]) == (2.0, 2.2, 2.2)
