"""What of ``tests.gpu.random_batches`` holds without a GPU: what is drawn, and that what goes wrong is noticed."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.gpu import planted, random_batches, random_check
from tests.gpu.random_batches import main, run, unserved
from tests.gpu.random_cases import MAX_KEYS, MAX_REQUESTS, MAX_TOKENS, PROBLEMS, RECIPES, Drawn, draw, shortened
from tests.gpu.random_check import Checker, config_of, drawn_of
from tl_backend.configs.prefill_hopper import HEAD_DIMS, hopper_refusal
from tl_backend.device import DeviceSpec
from tl_backend.ops import paged_attention
from tl_backend.testing.views import KV_LAYOUTS, OUT_VIEWS, Q_VIEWS

CPU, HOPPER = torch.device("cpu"), DeviceSpec.absent("sm_90")
DRAWN = [drawn_of(0, number, HOPPER) for number in range(2000)]


def lens(drawn: Drawn) -> list[tuple[int, int]]:
    return list(zip(drawn.case.query_lens, drawn.case.seq_lens, strict=True))


def test_the_family_takes_every_problem() -> None:
    assert [hopper_refusal(problem, HOPPER) for problem in PROBLEMS] == [None] * len(PROBLEMS)
    assert {problem.head_dim for problem in PROBLEMS} == set(HEAD_DIMS)
    assert {problem.group_size for problem in PROBLEMS} == {1, 4, 5, 7, 8, 12}
    assert {problem.page_size for problem in PROBLEMS} == {16, 48, 64, 128, 256, 784}
    for field in ("dtype", "causal", "returns_lse"):
        assert min(Counter(getattr(problem, field) for problem in PROBLEMS).values()) >= 2, field
    for field in ("window", "soft_cap", "sinks_dtype"):
        assert sum(getattr(problem, field) is not None for problem in PROBLEMS) >= 3, field


def test_a_seed_draws_the_same_batches_again_and_another_draws_others() -> None:
    assert [drawn_of(0, number, HOPPER) for number in range(50)] == DRAWN[:50]
    assert [drawn_of(1, number, HOPPER).case for number in range(50)] != [drawn.case for drawn in DRAWN[:50]]


def test_every_recipe_meets_every_problem() -> None:
    assert {(drawn.recipe, drawn.problem) for drawn in DRAWN} == set(product(RECIPES, PROBLEMS))


def test_every_view_occurs() -> None:
    assert {drawn.case.kv_layout for drawn in DRAWN} == set(KV_LAYOUTS)
    assert {drawn.case.q_view for drawn in DRAWN} == set(Q_VIEWS)
    assert {drawn.case.out_view for drawn in DRAWN} == set(OUT_VIEWS)


def test_batches_have_the_sizes_that_a_workspace_is_made_for() -> None:
    for drawn in DRAWN:
        case = drawn.case
        assert 1 <= sum(case.query_lens) <= MAX_TOKENS
        assert len(case.query_lens) <= MAX_REQUESTS
        assert sum(case.seq_lens) <= MAX_KEYS or len(case.seq_lens) == 1


def test_no_request_is_decoded() -> None:
    assert [drawn.number for drawn in DRAWN if drawn.case.has_decode and not drawn.batch_invariant] == []


@pytest.mark.parametrize(
    ("what", "least"),
    [
        (lambda drawn: 0 in drawn.case.query_lens and sum(drawn.case.query_lens) > 0, 200),
        (lambda drawn: 0 in drawn.case.seq_lens, 50),
        (lambda drawn: 1 in drawn.case.query_lens and not drawn.batch_invariant, 100),
        (lambda drawn: max(drawn.case.seq_lens) <= config_of("candidate", drawn.problem, HOPPER).block_n, 100),
        (lambda drawn: len(drawn.case.seq_lens) == 1 and not drawn.batch_invariant and lens(drawn)[0][1] > 4000, 20),
        (lambda drawn: max(drawn.case.seq_lens) > 8000, 10),
        (lambda drawn: any(q > k for q, k in lens(drawn)), 100),
        (lambda drawn: any(q and k and k % drawn.problem.page_size == 0 for q, k in lens(drawn)), 100),
        (lambda drawn: any(q and k % drawn.problem.page_size == 1 for q, k in lens(drawn)), 100),
        (lambda drawn: drawn.captured and shortened(drawn) != list(drawn.case.seq_lens), 100),
        (lambda drawn: drawn.slack is None, 200),
        (lambda drawn: drawn.slack is not None and max(drawn.slack) > 300, 200),
    ],
    ids=[
        "empty requests",
        "requests without keys",
        "one token that is prefilled beside decodes",
        "one iteration",
        "one long request",
        "8000 keys",
        "more queries than keys",
        "whole pages",
        "pages and one key",
        "graphs replayed with fewer keys",
        "no bounds",
        "bounds far off",
    ],
)
def test_what_must_occur_occurs(what, least: int) -> None:
    assert sum(map(what, DRAWN)) >= least


def test_what_is_shortened_keeps_its_queries() -> None:
    for drawn in DRAWN:
        for (query, keys), left in zip(lens(drawn), shortened(drawn), strict=True):
            assert min(query, keys) <= left <= keys


PROBLEM = random_check.CPU_PROBLEMS[1]  # With a window, sinks and the log-sum-exp.


def small() -> Drawn:
    """Some batch with more than one request, none of them long."""
    config = config_of("candidate", PROBLEM, DeviceSpec.of(CPU))
    for number in range(1000):
        drawn = draw(0, number, PROBLEM, keys=config.block_n, tokens=config.tokens_per_tile)
        if drawn.recipe == "ragged" and sum(drawn.case.seq_lens) < 2000:
            return drawn
    raise AssertionError("none")


class Wrong:
    """The operation, with one call of a batch followed by an effect on its output."""

    def __init__(self, call: int, effect) -> None:
        self.call, self.effect, self.calls = call, effect, 0

    def __call__(self, *args, out, **rest):
        paged_attention(*args, out=out, **rest)
        self.calls += 1
        if self.calls == self.call:
            self.effect(out, rest["lse"])
        return out


def test_a_right_batch_passes() -> None:
    outcome = Checker(CPU).check(small(), against_reference=True)
    assert outcome.message == ""
    assert 0.0 < outcome.apart < 1e-5
    assert 0.0 < outcome.error < 1e-5


# The portable family is launched first, then the candidate three times.
@pytest.mark.parametrize(
    ("call", "effect", "said"),
    [
        (2, lambda out, lse: out.mul_(1.0001), "PoisonError: error: relative RMS 1.00e-04 (limit 1e-05"),
        (1, lambda out, lse: out.mul_(1.0001), "the portable family relative RMS 1.00e-04"),
        (2, lambda out, lse: out[0].fill_(torch.nan), "PoisonError: P1: "),
        (2, lambda out, lse: lse.add_(1.0), "log-sum-exp off by 1.00e+00"),
        (3, lambda out, lse: out.mul_(1.0000002), "changed when launched again"),
        (4, lambda out, lse: out.mul_(1.0000002), "changed when unwritten slots are infinite"),
        (4, lambda out, lse: lse.mul_(1.0000002), "log-sum-exps changed when unwritten slots are infinite"),
    ],
)
def test_a_wrong_answer_is_said(call: int, effect, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_check, "paged_attention", Wrong(call, effect))
    assert said in Checker(CPU).check(small(), against_reference=False).message


@pytest.mark.parametrize(
    ("served", "said"), [(planted.hang, "no answer within 5 s; killed"), (planted.crash, "killed by SIGABRT")]
)
def test_a_hang_and_a_crash_cost_their_batch(served, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    tally, launched = run(7, range(2, 6), CPU, {}, limit_s=5.0, served=served)
    assert [(failure["seed"], failure["batch"]) for failure in tally.failures] == [(7, planted.AT)]
    assert tally.failures[0]["message"].endswith(said)
    assert (tally.batches, launched) == (4, {"prefill": 1})
    assert f"MISS seed 7, batch {planted.AT}" in capsys.readouterr().out


def test_kinds_that_were_never_launched_are_named() -> None:
    assert unserved({"prefill": 3, "prefill_combine": 0}, {"prefill", "prefill_hopper", "prefill_combine"}) == [
        "prefill_combine",
        "prefill_hopper",
    ]


def test_dry_run(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    assert main(["--device", "cpu", "--batches", "4", "--every", "2", "--processes", "2", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert (written["batches"], written["failed"], written["compiled_late"]) == (4, 0, 0)
    assert (written["against_reference"], written["failures"]) == (2, [])
    assert {"commit", "device", "driver", "torch", "cuda", "tilelang", "date"} <= written.keys()


def test_a_failure_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = random_batches.Tally(batches=4, failures=[{"batch": 1}])
    monkeypatch.setattr(random_batches, "compile_all", lambda keys, processes: ({}, {}))
    monkeypatch.setattr(random_batches, "run", lambda *args, **kwargs: (failed, {}))
    assert main(["--device", "cpu", "--batches", "4"]) == 1
