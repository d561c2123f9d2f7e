"""Workloads: what they count, and that their tensors get a right answer, with every feature of a problem."""

import dataclasses

import pytest
import torch

from tl_backend.errors import InvalidInputError
from tl_backend.measure import answers
from tl_backend.measure.answers import Answers
from tl_backend.measure.workload import Batch, Workload
from tl_backend.testing.cases import make_problem
from tl_backend.testing.poison_judge import relative_rms

CPU = torch.device("cpu")
LENS = {"query_lens": (1, 40, 7), "seq_lens": (90, 40, 65)}
PROBLEMS = {
    "paged": make_problem(6, 2, 48, 16),
    "page of 48": make_problem(4, 4, 32, 48),
    "window": make_problem(4, 2, 32, 16, window=20),
    "soft cap": make_problem(4, 2, 32, 16, soft_cap=2.0),
    "sinks, ALiBi, log-sum-exp": make_problem(6, 2, 32, 16, sinks_dtype="float32", has_alibi=True, returns_lse=True),
    "8-bit cache": make_problem(4, 2, 32, 16, kv_dtype="float8_e4m3fn"),
    "contiguous": make_problem(6, 2, 48, None),
    "contiguous, full": make_problem(4, 4, 32, None, causal=False),
    "contiguous, full, window": make_problem(4, 4, 32, None, causal=False, window=9),
    "paged, full, ALiBi": make_problem(4, 4, 32, 16, causal=False, has_alibi=True),
}


def workload(problem, **lens) -> Workload:
    return Workload(name="a test", problem=problem, **(lens or LENS))


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_batch_is_answered_right(name: str) -> None:
    batch = Batch(workload(PROBLEMS[name]), CPU)
    launch, out = batch.tilelang()
    assert torch.isnan(out).all()
    launch()
    assert relative_rms(out, batch.reference()) < 1e-5


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_sample_of_rows_is_the_reference_at_those_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(workload(PROBLEMS[name]), CPU)
    monkeypatch.setattr(answers, "WHOLE_REFERENCE_PAIRS", 0)
    sampled = Answers(batch)
    assert len(sampled.rows) > 20
    torch.testing.assert_close(sampled.want, batch.reference()[sampled.rows])


@pytest.mark.parametrize("name", PROBLEMS)
def test_pairs_are_those_that_the_reference_attends_to(name: str) -> None:
    problem, lens = PROBLEMS[name], LENS
    count = keys = 0
    for n, s in zip(lens["query_lens"], lens["seq_lens"], strict=True):
        seen = set()
        for position in range(s - n, s):
            window = problem.window or s + 1
            visible = {
                key for key in range(s) if (key <= position or not problem.causal) and abs(key - position) < window
            }
            count, seen = count + len(visible), seen | visible
        keys += len(seen)
    item = workload(problem)
    assert item.flops == 4 * problem.num_q_heads * problem.head_dim * count
    element = 1 if problem.is_quantized else 4
    assert item.kv_bytes == keys * problem.num_kv_heads * 2 * problem.head_dim * element
    assert item.io_bytes == item.kv_bytes + 2 * 48 * problem.num_q_heads * problem.head_dim * 4


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [((2,), (1,)), ((0,), (3,)), ((1, 1), (1,))], ids=["keys", "no query", "unequal"]
)
def test_lengths_that_do_not_fit_are_refused(query_lens, seq_lens) -> None:
    with pytest.raises(InvalidInputError, match="lengths of a test"):
        workload(PROBLEMS["paged"], query_lens=query_lens, seq_lens=seq_lens)


@pytest.mark.parametrize("name", ["paged", "8-bit cache", "sinks, ALiBi, log-sum-exp"])
def test_a_batch_like_another_has_its_data_in_other_pages(name: str) -> None:
    first = Batch(workload(PROBLEMS[name]), CPU)
    for page_size in (64, 16, 128):
        other = Batch(workload(dataclasses.replace(PROBLEMS[name], page_size=page_size)), CPU, like=first)
        assert other.kv_cache.shape[2] == page_size
        assert other.block_table.shape[1] == -(-90 // page_size)
        assert relative_rms(other.reference(), first.reference()) < 1e-12
        for mine, its in zip(other.keys_and_values(2), first.keys_and_values(2), strict=True):
            torch.testing.assert_close(mine.float(), its.float(), rtol=0, atol=0)


def test_a_planner_plans_again_in_the_same_buffers() -> None:
    batch = Batch(workload(PROBLEMS["paged"]), CPU)
    planner = batch.planner()
    first, second = planner(), planner()
    assert first.prefill.work.data_ptr() == second.prefill.work.data_ptr()
    launch, out = batch.tilelang(plan=second)
    launch()
    assert relative_rms(out, batch.reference()) < 1e-5
