"""What tells the rows of a table apart: every field of a problem by its class, every number of a step by its bucket."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from tl_backend.configs.key import WINDOWS, ProblemKey
from tl_backend.configs.regime import CONTEXT_LENS, PHASES, QUERY_LENS, REQUEST_COUNTS, Regime
from tl_backend.problem import DTYPES, FLOAT8_DTYPES, SUPPORTED_HEAD_DIMS, AttentionProblem

# Values of each field, and which classes of them serve as one. Fields that a problem ties to another change with it.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "num_q_heads": st.sampled_from((8, 16, 24, 32, 64, 71 * 8)),
    "num_kv_heads": st.sampled_from((1, 2, 4, 8)),
    "head_dim": st.sampled_from(SUPPORTED_HEAD_DIMS),
    "dtype": st.sampled_from(DTYPES),
    "kv_dtype": st.sampled_from((None, *FLOAT8_DTYPES)),  # None: the dtype of queries.
    "page_size": st.integers(1, 300).map(lambda n: 16 * n),
    "causal": st.booleans(),
    "window": st.none() | st.integers(1, 2**14) | st.sampled_from([w + d for w in WINDOWS for d in (0, 1)]),
    "soft_cap": st.sampled_from((None, 30.0, 50.0)),
    "sinks_dtype": st.sampled_from((None, "bfloat16", "float32")),
    "has_alibi": st.booleans(),
    "returns_lse": st.booleans(),
}
TIED = {"head_dim_v": "head_dim", "out_dtype": "dtype"}
CLASSES: dict[str, Any] = {
    # Which tiles a page is a multiple of.
    "page_size": lambda page: tuple(page % tile == 0 for tile in (32, 64, 128)),
    "window": lambda window: None if window is None else bisect.bisect_left(WINDOWS, window),
    "soft_cap": lambda cap: cap is not None,
    "sinks_dtype": lambda dtype: dtype is not None,
}


def problem(values: dict[str, Any]) -> AttentionProblem:
    tied = {field: values[other] for field, other in TIED.items()}
    return AttentionProblem(**{**values, "kv_dtype": values["kv_dtype"] or values["dtype"], **tied})


def test_every_field_of_a_problem_is_in_the_property_below() -> None:
    fields = {field.name for field in dataclasses.fields(AttentionProblem)}
    assert fields == VALUES.keys() | TIED.keys()


@given(st.fixed_dictionaries(VALUES), st.sampled_from(sorted(VALUES)), st.data())
def test_a_key_changes_with_every_field_between_classes_and_not_within(
    values: dict[str, Any], field: str, data: st.DataObject
) -> None:
    """CASES.md C9: no figure of one shape or contract is another's; and a new page size does not miss for ever."""
    other = data.draw(VALUES[field])
    assume(other != values[field])
    class_of = CLASSES.get(field, lambda value: value)
    same = ProblemKey.of(problem(values)) == ProblemKey.of(problem(values | {field: other}))
    assert same == (class_of(other) == class_of(values[field]))


@given(st.fixed_dictionaries(VALUES))
def test_a_representative_is_of_the_class_that_it_stands_for(values: dict[str, Any]) -> None:
    key = ProblemKey.of(problem(values))
    assert ProblemKey.of(key.representative()) == key


def test_keys_of_paged_and_contiguous_problems_differ() -> None:
    values = dict.fromkeys(VALUES) | {"num_q_heads": 8, "num_kv_heads": 8, "head_dim": 64}
    values |= {"dtype": "float16", "page_size": 16, "causal": True, "has_alibi": False, "returns_lse": False}
    assert ProblemKey.of(problem(values)) != ProblemKey.of(problem(values | {"page_size": None}))


# For each number of a step: bounds of its buckets, and the phases in which it counts.
NUMBERS = {
    "query_len": (QUERY_LENS, {"prefill", "extend", "verify"}),
    "context_len": (CONTEXT_LENS, {"extend", "decode", "verify"}),
    "num_requests": (REQUEST_COUNTS, set(PHASES)),
}
STEPS = st.fixed_dictionaries(
    {"phase": st.sampled_from(PHASES)}
    | {
        name: st.integers(1, 2**17) | st.sampled_from([bound + d for bound in bounds for d in (0, 1)])
        for name, (bounds, _) in NUMBERS.items()
    }
)


@given(STEPS, st.sampled_from(sorted(NUMBERS)), st.data())
def test_a_regime_changes_with_every_number_between_buckets_and_not_within(
    step: dict[str, Any], name: str, data: st.DataObject
) -> None:
    """CASES.md C9, C13: one bucket, one regime; the last bucket has no upper bound, and is no neighbour's."""
    bounds, phases = NUMBERS[name]
    other = data.draw(st.integers(1, 2**17) | st.sampled_from([bound + d for bound in bounds for d in (0, 1)]))
    same = Regime.of(**step) == Regime.of(**step | {name: other})
    in_one = bisect.bisect_left(bounds, other) == bisect.bisect_left(bounds, step[name])
    assert same == (in_one or step["phase"] not in phases)


@given(STEPS, st.sampled_from(PHASES))
def test_a_regime_changes_with_the_phase(step: dict[str, Any], phase: Any) -> None:
    assert (Regime.of(**step) == Regime.of(**step | {"phase": phase})) == (phase == step["phase"])
