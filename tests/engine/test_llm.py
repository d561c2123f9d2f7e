"""``LLM(...)`` on the CPU, engine core and worker spawned: greedy tokens equal vLLM's own backend's. GQA ratio 7."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from tests.engine.faults import FAULTS
from tests.engine.llm_child import BLOCK
from tests.tables import make_row, make_table, regime
from tl_backend.configs.choice import default_config
from tl_backend.configs.identity import BY_NAME, spec_of
from tl_backend.testing.cases import make_problem
from tl_backend.tuner.store import Store

CPU = BY_NAME["cpu"]

SCENARIOS = ["mixed", "chunked", "prefix_hit", "preempted"]


@pytest.fixture(scope="module")
def builtin(run_llm, gqa7_model):
    result, launches = run_llm(gqa7_model, None)
    assert launches == {}
    return result[""]


@pytest.fixture(scope="module")
def users_table(tmp_path_factory):
    """A folder of tables with other tiles than the defaults for some regimes of these scenarios, and its label."""
    problem = make_problem(14, 2, 32, BLOCK)
    prefill, decode = (default_config(kind, problem, spec_of(CPU)) for kind in ("prefill", "decode"))
    rows = [
        make_row(problem, regime("decode", 1, 500, 8), replace(decode, tile=replace(decode.tile, block_n=16)), CPU),
        make_row(problem, regime("extend", 60, 500, 1), replace(prefill, block_m=16, block_n=16), CPU),
    ]
    folder = tmp_path_factory.mktemp("tables")
    store = Store(folder)
    return folder, store.promote(CPU, store.write_generation(make_table(*rows, device=CPU))).label


@pytest.fixture(scope="module")
def served(run_llm, gqa7_model, users_table, tmp_path_factory):
    """What the engine answers with that table, and its launches by kernel and source."""
    launches = tmp_path_factory.mktemp("launches")
    tables = {"TL_BACKEND_TABLE_DIR": str(users_table[0]), "TL_BACKEND_LAUNCH_LOG_DIR": str(launches)}
    result, counts = run_llm(gqa7_model, "tilelang", {"TL_BACKEND_CPU": "1"} | tables)
    assert min(counts[kernel] for kernel in ("prefill", "decode", "cache_write")) > 0
    rows = Counter()
    for file in launches.glob("*.json"):
        for kernel, sources in json.loads(file.read_text())["rows"].items():
            rows.update({(kernel, source): count for source, count in sources.items()})
    return result[""], rows


@pytest.fixture(scope="module")
def tilelang(served):
    return served[0]


@pytest.fixture(scope="module")
def faulty(run_llm, gqa7_model, fault_env):
    task = {"faults": FAULTS, "fault_file": fault_env["ATTENTION_FAULT_FILE"]}
    return run_llm(gqa7_model, "tilelang", {"TL_BACKEND_CPU": "1"} | fault_env, **task)[0]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_tokens_equal_the_builtin_backends(scenario, tilelang, builtin, compare):
    assert compare(tilelang[scenario]["answers"], builtin[scenario]["answers"]) == []


def test_the_engine_reads_a_users_table_and_its_launches_say_which_row_served_them(served, users_table):
    label = users_table[1]
    assert set(served[1]) == {
        ("decode", f"{label} row 1"),
        ("decode", "family default"),
        ("prefill", f"{label} row 2"),
        ("prefill", "family default"),
    }
    assert min(served[1].values()) > 0


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
