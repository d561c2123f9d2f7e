"""A server compiles before it is ready, once: never while requests wait, and not again at the next start."""

import json
from collections import Counter

import pytest

from tl_backend.ops.compiled import COMPILED, KERNELS_EVENT, LOADED


def kernels_of(folder):
    """Where the kernels of all processes came from."""
    found = Counter()
    for file in folder.glob("*.json"):
        found.update(json.loads(file.read_text())["events"].get(KERNELS_EVENT, {}))
    return dict(found)


@pytest.fixture(scope="module")
def starts(run_llm, gqa7_model, tmp_path_factory):
    """Two starts with one kernel cache, empty at the first: answers, and where the kernels came from."""
    cache = tmp_path_factory.mktemp("kernels")
    found = []
    for _ in range(2):
        launches = tmp_path_factory.mktemp("launches")
        env = {"TL_BACKEND_CPU": "1", "TL_BACKEND_CACHE_DIR": str(cache), "TL_BACKEND_LAUNCH_LOG_DIR": str(launches)}
        result, _ = run_llm(gqa7_model, "tilelang", env)
        found.append((result[""], kernels_of(launches)))
    return found


def test_the_first_start_compiles_before_it_serves_and_the_second_compiles_nothing(starts):
    """CASES.md C6. One worker, one problem: a prefill, two decodes, their combine and the cache write."""
    assert [kernels for _, kernels in starts] == [{COMPILED: 5}, {LOADED: 5}]


def test_kernels_from_the_cache_answer_as_those_just_compiled(starts):
    first, second = (answers for answers, _ in starts)
    assert second == first
