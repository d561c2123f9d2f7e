"""What becomes a row, what is settled, and what stays open; and a table's entries for other problems stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tl_backend.configs.choice import default_config
from tl_backend.configs.identity import device_identity
from tl_backend.configs.key import ProblemKey
from tl_backend.configs.prefill import default_prefill_config
from tl_backend.configs.table import dump_table, parse_table
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem
from tl_backend.testing.cases import make_problem
from tl_backend.tuner.entries import Entries, entries_of, table_of, toolchain_of
from tl_backend.tuner.found import Found, Outcome
from tl_backend.tuner.regimes import cases

DEVICE = replace(DeviceSpec.absent("sm_90"), name="NVIDIA H200")
ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "570.1",
    "torch": "2.11",
    "cuda": "13.0",
    "hip": "None",
    "tilelang": "0.1.12",
    "date": "2026-07-01",
}
LLAMA, QWEN = make_problem(32, 8, 128, 16, dtype="bfloat16"), make_problem(28, 4, 128, 16, dtype="bfloat16")


def found(problem: AttentionProblem, *, gain: float = 1.2, complete: bool = True, finished: int = 3) -> Outcome:
    """A prefill's search: its first case has a winner, the others have none."""
    default = default_prefill_config(problem, DEVICE)
    where = cases("prefill", problem, DEVICE)[:3]
    finals = {case: {0: [2.0] * 16, 1: [2.0 / (gain if case == where[0] else 1.0)] * 16} for case in where[:finished]}
    kinds = {
        "prefill": Found(
            candidates=(default, replace(default, block_n=32)), cases=where, finals=finals, complete=complete
        )
    }
    return Outcome(problem=problem, kinds=kinds)


def test_a_winner_is_a_row_with_its_figures_and_the_others_are_settled() -> None:
    outcome = found(LLAMA)
    entries = entries_of(outcome, ENVIRONMENT)
    (row,) = entries.rows
    kind = outcome.kinds["prefill"]
    assert (row.problem, row.regime) == (ProblemKey.of(LLAMA), kind.cases[0].regime)
    assert row.config.values == kind.candidates[1]
    figures = row.provenance
    assert (figures.kind, figures.gpu, figures.driver) == ("measured", "NVIDIA H200", "570.1")
    assert figures.us == pytest.approx(2000 / 1.2)
    assert figures.default_us == 2000
    assert figures.times_default.median == pytest.approx(1.2)
    assert [entry.regime for entry in entries.settled] == [case.regime for case in kind.cases[1:]]
    assert {(entry.us, entry.family) for entry in entries.settled} == {(2000, "portable")}
    assert entries.open == ()


def test_what_hoppers_default_wins_is_settled_for_its_family() -> None:
    outcome = found(LLAMA)
    kind = outcome.kinds["prefill"]
    default = default_config("prefill", LLAMA, DEVICE)
    kind.candidates = (default, replace(default, block_n=96))
    entries = entries_of(outcome, ENVIRONMENT)
    assert {entry.family for entry in entries.settled} == {"hopper"}
    assert (entries.rows[0].config.family, entries.rows[0].config.values) == ("hopper", kind.candidates[1])


def test_no_row_without_gain() -> None:
    entries = entries_of(found(LLAMA, gain=1.005), ENVIRONMENT)
    assert entries.rows == ()
    assert len(entries.settled) == 3


def test_what_was_not_tried_leaves_a_case_open_that_nothing_has_won_yet() -> None:
    entries = entries_of(found(LLAMA, complete=False, finished=2), ENVIRONMENT)
    assert len(entries.rows) == 1
    assert entries.settled == ()
    assert len(entries.open) == 2


def table(*outcomes: Outcome, base=None):
    return table_of(
        [entries_of(outcome, ENVIRONMENT) for outcome in outcomes], device_identity(DEVICE), ENVIRONMENT, base=base
    )


def test_a_table_is_one_that_can_be_read() -> None:
    written = table(found(LLAMA), found(QWEN))
    assert parse_table(dump_table(written), "written", device=device_identity(DEVICE)) == written
    assert written.device.name == "nvidia_h200"
    assert written.toolchain == toolchain_of(ENVIRONMENT)
    assert (written.toolchain.cuda, written.toolchain.hip) == ("13.0", None)


def test_new_entries_replace_old_ones_of_their_problem_and_regime_alone() -> None:
    base = table(found(LLAMA), found(QWEN))
    # What was a row is settled now.
    after = table(found(LLAMA, gain=1.0), base=base)
    assert [row.problem for row in after.rows] == [ProblemKey.of(QWEN)]
    assert len(after.settled) == 5
    again = table(found(LLAMA), base=after)
    assert dump_table(again) == dump_table(base)


def test_nothing_new_leaves_the_base() -> None:
    base = table(found(LLAMA))
    assert table_of([Entries()], device_identity(DEVICE), ENVIRONMENT, base=base).rows == base.rows
