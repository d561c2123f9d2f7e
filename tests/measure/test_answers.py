"""A wrong answer is seen, wherever it is wrong."""

import pytest
import torch

from tl_backend.measure import answers
from tl_backend.measure.answers import Answers
from tl_backend.measure.workload import Batch, Workload
from tl_backend.testing.cases import make_problem

WORKLOAD = Workload(name="a test", problem=make_problem(4, 2, 32, 16), query_lens=(40, 30), seq_lens=(40, 77))


@pytest.fixture(params=["whole", "sampled"])
def checked(request, monkeypatch: pytest.MonkeyPatch):
    if request.param == "sampled":
        monkeypatch.setattr(answers, "WHOLE_REFERENCE_PAIRS", 0)
    torch.manual_seed(0)
    batch = Batch(WORKLOAD, torch.device("cpu"))
    launch, out = batch.tilelang()
    launch()
    return Answers(batch), out


def test_a_right_answer_has_no_problem(checked) -> None:
    right, out = checked
    assert right.problem_of(out) is None


def test_an_unwritten_element_is_seen_in_any_row(checked) -> None:
    right, out = checked
    unsampled = sorted(set(range(len(out))) - set(right.rows.tolist()))
    out[(unsampled or [17])[0], 1, 3] = torch.nan
    assert "nan" in right.problem_of(out)


@pytest.mark.parametrize("row", [0, 69])
def test_one_head_of_one_row_that_is_off_is_seen(checked, row: int) -> None:
    right, out = checked
    out[row, 2] *= 1.01
    assert right.problem_of(out).startswith("its answer is off by")
