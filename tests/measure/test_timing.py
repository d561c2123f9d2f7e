"""Comparisons: launches take turns, and are repeated until ratios are settled or a limit is met."""

import time

import pytest
import torch

from tl_backend.measure import timing
from tl_backend.measure.timing import as_graph, compare, ratio, step_cost

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


def test_a_limit_of_seconds_cuts_the_rounds(clock) -> None:
    calls = clock(own=lambda r: 100.0, peer=lambda r: 150.0 + 50 * (r % 2))
    found = compare("own", launches("own", "peer"), CPU, rounds=31, max_rounds=310, max_seconds=5.0)
    # A round of 275 ms: 18 fit, and no second pass.
    assert [rounds for rounds, _ in calls] == [timing.WARMUP - 1, 18]
    assert not found.is_settled
    assert len(found.times["own"]) == 18


def test_a_round_that_is_longer_than_the_limit_is_still_measured(clock) -> None:
    clock(own=lambda r: 1000.0, peer=lambda r: 1500.0)
    found = compare("own", launches("own", "peer"), CPU, rounds=31, max_rounds=310, max_seconds=1.0)
    assert len(found.times["own"]) == timing.MIN_ROUNDS
    assert found.ratios["peer"]["median"] == 1.5


def test_what_is_done_once_a_step_is_charged_to_each_launch(clock) -> None:
    clock(own=lambda r: 2.0, peer=lambda r: 3.0)
    found = compare("own", launches("own", "peer"), CPU, charges_ms={"own": 0.5, "peer": 1.0})
    assert (found.times["own"][0], found.times["peer"][0]) == (2.5, 4.0)
    assert found.ratios["peer"]["median"] == 1.6


def test_a_graph_of_several_launches_launches_them_all() -> None:
    done: list[int] = []
    as_graph(lambda: done.append(1), CPU, 3)()
    assert len(done) == 3


def test_the_host_s_part_of_a_step_is_measured() -> None:
    done: list[float] = []
    cost = step_cost(lambda: done.append(time.sleep(0.002)), CPU, rounds=3)
    assert cost.device_us == 0
    assert 2000 <= cost.host_us < 2e6
    assert len(done) == 4
