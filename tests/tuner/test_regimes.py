"""Each case's batch lies in the regime that its row is for, and a plan looks it up there."""

from __future__ import annotations

import pytest
import torch

from tl_backend.configs.choice import Choice, FixedChooser
from tl_backend.configs.regime import Regime
from tl_backend.device import DeviceSpec
from tl_backend.measure.workload import Workload
from tl_backend.problem import AttentionProblem
from tl_backend.testing.cases import make_problem
from tl_backend.tuner.batches import CacheBatch, num_pages, random_cache
from tl_backend.tuner.regimes import MAX_KV_BYTES, Case, cases, kv_bytes_per_token

HOPPER = DeviceSpec.absent("sm_90")
CPU = DeviceSpec.absent("c")
PROBLEMS = [
    make_problem(32, 8, 128, 16, dtype="bfloat16"),
    make_problem(28, 4, 128, 128, dtype="bfloat16"),
    make_problem(64, 64, 256, 16, dtype="float16"),
    make_problem(64, 8, 64, 16, dtype="bfloat16", window=128),
    make_problem(16, 8, 256, 16, dtype="bfloat16", window=4096, soft_cap=50.0),
    make_problem(8, 1, 128, 4352, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_cases_differ_in_regime_and_fit(problem: AttentionProblem, kind: str) -> None:
    found = cases(kind, problem, HOPPER)
    assert len(found) >= 4
    assert len({case.regime for case in found}) == len({str(case) for case in found}) == len(found)
    for case in found:
        assert case.regime.kind == kind
        assert case.num_requests * case.seq_len * kv_bytes_per_token(problem) <= MAX_KV_BYTES
        in_regime = Regime.of(
            phase=case.regime.phase,
            query_len=case.query_len,
            context_len=case.seq_len,
            num_requests=case.num_requests,
        )
        assert in_regime == case.regime


def test_llama_has_the_regimes_that_a_server_meets() -> None:
    problem = PROBLEMS[0]
    assert len(cases("prefill", problem, HOPPER)) == 9
    decodes = cases("decode", problem, HOPPER)
    # 65 requests of more than 16384 keys fill more than there is: 32 layers of it are more than a GPU has.
    assert len(decodes) == 15
    assert not [case for case in decodes if (case.regime.num_requests, case.regime.context_len) == (None, None)]


def test_less_memory_leaves_fewer_cases() -> None:
    every, few = (cases("decode", PROBLEMS[0], HOPPER, memory_bytes=memory) for memory in (None, 1 << 30))
    assert {case.regime for case in few} < {case.regime for case in every}


def test_what_a_window_hides_is_not_a_regime_of_its_own() -> None:
    assert {case.regime.context_len for case in cases("decode", PROBLEMS[3], HOPPER)} == {1024}
    assert {case.regime.context_len for case in cases("decode", PROBLEMS[4], HOPPER)} == {1024, 4096}


@pytest.mark.parametrize("window", [None, 100])
def test_a_plan_of_a_batch_asks_for_the_regime_of_its_case(window: int | None) -> None:
    problem = make_problem(2, 1, 32, 16, window=window)
    found: list[Case] = [*cases("decode", problem, CPU), *cases("prefill", make_problem(1, 1, 32, 16), CPU)]
    assert found
    for case in found:
        asked: list[Regime] = []

        class Asked(FixedChooser):
            def choose(self, regime: Regime, asked: list[Regime] = asked) -> Choice:
                asked.append(regime)
                return super().choose(regime)

        workload = Workload(
            name=str(case),
            problem=problem,
            query_lens=(case.query_len,) * case.num_requests,
            seq_lens=(case.seq_len,) * case.num_requests,
        )
        batch = CacheBatch(workload, random_cache(problem, num_pages(workload), torch.device("cpu")))
        batch.plan(Asked(problem, CPU))
        assert asked == [case.regime]
