"""``LLM(...)`` on the CPU, engine core and worker spawned: greedy tokens equal vLLM's own backend's. GQA ratio 7."""

import pytest

from tests.engine.faults import FAULTS

SCENARIOS = ["mixed", "chunked", "prefix_hit", "preempted"]


@pytest.fixture(scope="module")
def builtin(run_llm, gqa7_model):
    result, launches = run_llm(gqa7_model, None)
    assert launches == {}
    return result[""]


@pytest.fixture(scope="module")
def tilelang(run_llm, gqa7_model):
    result, launches = run_llm(gqa7_model, "tilelang", {"TL_BACKEND_CPU": "1"})
    assert min(launches[kernel] for kernel in ("prefill", "decode", "cache_write")) > 0
    return result[""]


@pytest.fixture(scope="module")
def faulty(run_llm, gqa7_model, fault_env):
    task = {"faults": FAULTS, "fault_file": fault_env["ATTENTION_FAULT_FILE"]}
    return run_llm(gqa7_model, "tilelang", {"TL_BACKEND_CPU": "1"} | fault_env, **task)[0]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_tokens_equal_the_builtin_backends(scenario, tilelang, builtin, compare):
    assert compare(tilelang[scenario]["answers"], builtin[scenario]["answers"]) == []


def test_the_scenarios_are_what_they_say(tilelang, builtin):
    for runs in (tilelang, builtin):
        assert [answer["cached"] for answer in runs["prefix_hit"]["answers"]] == [0, 96, 96]
        assert runs["preempted"]["preemptions"] > 0
        assert all(runs[scenario]["preemptions"] == 0 for scenario in ("mixed", "chunked", "prefix_hit"))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_planted_fault_shows(scenario, fault, faulty, builtin, compare):
    """In the tokens of every prompt, not only in their probabilities."""
    answers = builtin[scenario]["answers"]
    messages = compare(faulty[fault][scenario]["answers"], answers)
    assert sum("tokens" in message for message in messages) == len(answers)
