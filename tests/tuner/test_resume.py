"""A search goes on from a table: what it has is known, and its best configs are what others of a class try."""

from __future__ import annotations

from dataclasses import replace

from tests.tables import LLAMA, make_row, make_table, regime
from tl_backend.configs.choice import default_config
from tl_backend.configs.decode import DecodeChoice
from tl_backend.configs.key import ProblemKey
from tl_backend.configs.prefill import default_prefill_config
from tl_backend.configs.rows import Modelled, Settled
from tl_backend.configs.space import space
from tl_backend.device import DeviceSpec
from tl_backend.tuner.anchors import anchor_class
from tl_backend.tuner.resume import known_finalists, known_regimes, usable
from tl_backend.tuner.tune import plan_of

HOPPER = DeviceSpec.absent("sm_90")
QWEN = replace(LLAMA, num_q_heads=28, num_kv_heads=4)
DECODES = [config for config in space("decode", LLAMA, HOPPER).kept if isinstance(config, DecodeChoice)]
AT = [regime(context_len=keys) for keys in (1000, 4000, 16000)]
ROWS = (make_row(at=AT[0], config=DECODES[1]), make_row(at=AT[1], config=DECODES[9]))
TABLE = make_table(*ROWS, settled=(Settled(problem=ProblemKey.of(LLAMA), regime=AT[2], us=3.0),))


def test_what_was_measured_is_known_and_a_model_is_not() -> None:
    assert known_regimes(TABLE, LLAMA) == frozenset(AT)
    assert known_regimes(TABLE, QWEN) == frozenset()
    assert known_regimes(None, LLAMA) == frozenset()
    modelled = make_table(ROWS[0].model_copy(update={"provenance": Modelled(reason="a guess")}))
    assert known_regimes(modelled, LLAMA) == frozenset()
    assert known_finalists(modelled) == {}


def test_a_class_has_the_configs_that_were_best_somewhere() -> None:
    found = known_finalists(TABLE)
    assert found == {anchor_class(LLAMA): {"decode": (DECODES[1], DECODES[9])}}
    assert known_finalists(None) == {}


def test_a_plan_leaves_known_regimes_out_and_tries_the_known_finalists() -> None:
    whole = plan_of(LLAMA, HOPPER, kinds=("decode",))
    rest = plan_of(LLAMA, HOPPER, kinds=("decode",), known=known_regimes(TABLE, LLAMA))
    assert set(whole.cases["decode"]) > set(rest.cases["decode"])
    assert {case.regime for case in whole.cases["decode"]} - {case.regime for case in rest.cases["decode"]} == set(AT)
    plan = plan_of(QWEN, HOPPER, finalists=known_finalists(TABLE)[anchor_class(QWEN)])
    assert len(plan.candidates["decode"]) == 3
    assert plan.candidates["decode"][0] == default_config("decode", QWEN, HOPPER)
    # No row of a prefill: its whole space is tried.
    assert plan.candidates["prefill"] == space("prefill", QWEN, HOPPER).kept


def test_nothing_is_left_of_a_problem_whose_regimes_are_known() -> None:
    cases = plan_of(LLAMA, HOPPER, kinds=("decode",)).cases["decode"]
    plan = plan_of(LLAMA, HOPPER, kinds=("decode",), known=frozenset(case.regime for case in cases))
    assert plan.candidates == {}


def test_what_would_not_serve_is_no_ground_to_go_on_from() -> None:
    """A table from before Hopper's family: its prefills are searched again, and its decodes are not."""
    late = [regime("prefill", tokens, tokens) for tokens in (100, 1000, 5000)]
    portable = replace(default_prefill_config(LLAMA, HOPPER), block_n=32)
    rows = (*ROWS, make_row(at=late[0], config=portable), make_row(at=late[1]))
    settled = [Settled(problem=ProblemKey.of(LLAMA), regime=at, us=3.0) for at in (AT[2], late[2])]
    kept, reasons = usable(make_table(*rows, settled=tuple(settled)), HOPPER)
    assert [row.regime for row in kept.rows] == [AT[0], AT[1], late[1]]
    assert [entry.regime for entry in kept.settled] == [AT[2]]
    assert len(reasons) == 2
    assert "a portable tile, where Hopper's family" in reasons[0]
    assert "the portable family's default was the best" in reasons[1]
    assert known_regimes(kept, LLAMA) == {*AT, late[1]}
    assert known_finalists(kept)[anchor_class(LLAMA)]["prefill"] == (default_config("prefill", LLAMA, HOPPER),)
    assert usable(TABLE, HOPPER) == (TABLE, ())
