"""A server compiles before it is ready, once: never while requests wait, and not again at the next start."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from tests.engine.llm_child import BLOCK
from tl_backend.ops.compiled import COMPILED, KERNELS_EVENT, LOADED


def kernels_of(folder):
    """Where the kernels of all processes came from."""
    found = Counter()
    for file in folder.glob("*.json"):
        found.update(json.loads(file.read_text())["events"].get(KERNELS_EVENT, {}))
    return dict(found)


@pytest.fixture(scope="module")
def starts(run_llm, gqa7_model, tmp_path_factory):
    """Two starts with one kernel cache, empty at the first; and that cache. Of each start answers, and kernels' origin.

    At the second there is no compiler for TileLang, by CC, which torch's own compiler does not read.
    """
    cache = tmp_path_factory.mktemp("kernels")
    found = []
    for compiler in ({}, {"CC": "/nowhere/cc"}):
        launches = tmp_path_factory.mktemp("launches")
        env = {"TL_BACKEND_CPU": "1", "TL_BACKEND_CACHE_DIR": str(cache), "TL_BACKEND_LAUNCH_LOG_DIR": str(launches)}
        result, _ = run_llm(gqa7_model, "tilelang", env | compiler)
        found.append((result[""], kernels_of(launches)))
    return found, cache


def test_the_first_start_compiles_before_it_serves_and_the_second_compiles_nothing(starts):
    """CASES.md C6, C17. One worker, one problem: a prefill, two decodes, their combine and the cache write."""
    assert [kernels for _, kernels in starts[0]] == [{COMPILED: 5}, {LOADED: 5}]


def test_kernels_from_the_cache_answer_as_those_just_compiled(starts):
    first, second = (answers for answers, _ in starts[0])
    assert second == first


def test_prebuild_makes_the_kernels_that_the_engine_asks_for(starts, gqa7_model, tmp_path):
    """CASES.md C17: an image that has them needs no compiler."""
    command = ["prebuild", "--model", str(gqa7_model / "config.json"), "--page-size", str(BLOCK), "--arch", "c"]
    subprocess.run([sys.executable, "-m", "tl_backend.cli", *command, "--out", str(tmp_path)], check=True)
    assert {path.name for path in tmp_path.glob("*.json")} == {path.name for path in starts[1].glob("*.json")}
