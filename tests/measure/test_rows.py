"""A row: figures follow from times and ceilings, and what goes wrong is told instead of timed."""

import dataclasses
import json

import pytest
import torch

from tl_backend.measure import rows as module
from tl_backend.measure.answers import Answers
from tl_backend.measure.ceilings import Ceilings
from tl_backend.measure.results import document, write_results
from tl_backend.measure.rows import TILELANG, Method, measure_batch, measure_row
from tl_backend.measure.workload import Batch, Workload
from tl_backend.testing.cases import make_problem

CPU = torch.device("cpu")
CEILINGS = Ceilings(matmul_tflops=1e-3, copy_tbps=1.0, dtype="float32", matmul={}, copy={}, best={})
WORKLOAD = Workload(name="a test", problem=make_problem(4, 2, 32, 16), query_lens=(40,), seq_lens=(40,))


def test_figures_follow_from_the_time(tmp_path) -> None:
    row = measure_row(WORKLOAD, CPU, CEILINGS, rounds=3, max_rounds=3)
    assert row.problems is None
    assert row.error < 1e-5
    assert row.kernels.keys() == {TILELANG, "sdpa-flash"}
    assert row.times.keys() == row.what.keys() == {"sdpa-flash"}
    assert row.rounds == 3
    assert row.source
    own = row.kernels[TILELANG]
    flops = 4 * 4 * 32 * 40 * 41 / 2
    assert row.flops == flops
    assert own.tflops == pytest.approx(flops / own.us / 1e6)
    assert own.tbps == pytest.approx(WORKLOAD.io_bytes / own.us / 1e6)
    # Bound by the matmul: flops / 1e9 microseconds are the least.
    assert own.of_roofline == pytest.approx(flops / 1e3 / own.us, rel=1e-6)
    path = tmp_path / "new" / "rows.json"
    write_results(path, document([row], CEILINGS, CPU))
    read = json.loads(path.read_text())
    assert read["rows"][0]["kernels"][TILELANG] == dataclasses.asdict(own)
    assert read["environment"].keys() >= {"gpu", "driver", "torch", "tilelang", "date"}


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (lambda: None, "its answer is off by nan"),
        (lambda: {}["no key"], "KeyError: 'no key'"),
    ],
    ids=["wrong", "raises"],
)
def test_a_kernel_that_fails_is_not_timed(launch, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch, "tilelang", lambda self, plan: (launch, self.new_out()))
    row = measure_row(WORKLOAD, CPU, CEILINGS)
    assert row.problems.startswith(said)
    assert row.kernels == row.times == {}


def test_a_peer_that_no_graph_captures_costs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = []

    def as_graph(launch, device, repeats):
        captured.append(launch)
        if len(captured) > 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return launch

    monkeypatch.setattr(module, "as_graph", as_graph)
    row = measure_row(WORKLOAD, CPU, CEILINGS, rounds=3, max_rounds=3)
    assert row.kernels.keys() == {TILELANG}
    assert row.absent["sdpa-flash"].startswith("no graph captures it: RuntimeError: operation not permitted")


def test_a_step_s_cost_is_charged_and_told() -> None:
    batch = Batch(WORKLOAD, CPU)
    method = Method(rounds=3, max_rounds=3, layers=2)
    row = measure_batch(batch, Answers(batch), CEILINGS, method, variants={"the same": None})
    assert row.step.keys() == {TILELANG, "the same"}
    assert row.step[TILELANG].host_us > 0
    assert row.variants["the same"].times.keys() == {"sdpa-flash"}
    assert row.variants["the same"].error == row.error


def test_a_launch_that_is_right_once_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    tilelang = Batch.tilelang

    def once(self, plan):
        launch, out = tilelang(self, plan=plan)
        left = [launch]
        return lambda: left.pop()() if left else None, out

    monkeypatch.setattr(Batch, "tilelang", once)
    row = measure_row(WORKLOAD, CPU, CEILINGS)
    assert row.problems.startswith("its answer is off by nan")
    assert row.error < 1e-5
    assert row.kernels == {}
