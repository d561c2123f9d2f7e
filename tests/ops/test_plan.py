"""Plans and workspaces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tl_backend.errors import EnvironmentProblemError, InvalidInputError, UnsupportedError
from tl_backend.ops import AttentionPlan, AttentionWorkspace, plan_attention
from tl_backend.ops.compiled import KERNELS, KernelKey
from tl_backend.testing.cases import make_problem
from tl_backend.testing.poison_run import forced_splits

CPU = torch.device("cpu")
SMALL = make_problem(8, 2, 64, 16)


def plan(workspace: AttentionWorkspace, query_lens: tuple[int, ...], *, problem=SMALL, **changes) -> AttentionPlan:
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    names = {
        "cu_seqlens_q_cpu": starts,
        "max_seqlen_q": max(query_lens, default=0),
        "max_seqlen_k": 100,
        "workspace": workspace,
    }
    seq_lens = torch.full((len(query_lens),), 50, dtype=torch.int32)
    return plan_attention(problem, starts, seq_lens, **{**names, **changes})


def workspace(max_num_reqs: int = 8, max_num_tokens: int = 100, problem=SMALL) -> AttentionWorkspace:
    return AttentionWorkspace(problem, CPU, max_num_reqs=max_num_reqs, max_num_tokens=max_num_tokens)


@pytest.mark.parametrize(
    ("query_lens", "num_decodes", "prefilled"),
    [
        ((1, 1, 1), 3, set()),
        ((1, 0, 1, 5, 1, 0, 2), 3, {3, 4, 6}),
        ((5, 1), None, {0, 1}),
        ((0, 5), None, {1}),
        ((0, 0), None, set()),
        ((0, 1), 2, set()),
        ((), None, set()),
    ],
    ids=str,
)
def test_split_point(query_lens, num_decodes: int | None, prefilled: set[int]) -> None:
    """CASES.md A11 among them: no request, and no token."""
    made = plan(workspace(), query_lens)
    assert (made.decode and made.decode.num_requests) == num_decodes
    found = set() if made.prefill is None else {int(r) for r in made.prefill.work[: made.prefill.num_work, 0]}
    assert found == prefilled
    assert made.num_rows == sum(query_lens)


def test_a_longest_query_of_one_makes_all_requests_decodes() -> None:
    assert plan(workspace(), (1, 1, 0, 1), max_seqlen_q=1).prefill is None


def test_work_is_ordered_by_the_bound_of_the_sequence_lengths() -> None:
    made = plan(workspace(), (2, 40, 3), seq_lens_cpu_upper_bound=torch.tensor([2, 90, 1000]))
    assert made.prefill.work[: made.prefill.num_work, 0].tolist()[0] == 2


def test_the_largest_step_fits_its_buffers() -> None:
    """Each request but one has a tile of one token, the worst that max_num_reqs and max_num_tokens allow."""
    space = workspace(max_num_reqs=5, max_num_tokens=100)
    made = plan(space, (2, 2, 2, 2, 92))
    assert made.prefill.num_work <= len(space.work)
    with pytest.raises(InvalidInputError, match=r"step: got 5 requests, 101 tokens; .* 5 and 100"):
        plan(space, (2, 2, 2, 2, 93))
    with pytest.raises(InvalidInputError, match=r"step: got 6 requests, 6 tokens"):
        plan(space, (1,) * 6)


def test_a_workspace_belongs_to_one_problem() -> None:
    with pytest.raises(InvalidInputError, match="Make one AttentionWorkspace for each problem"):
        plan(workspace(), (1,), problem=make_problem(8, 2, 64, 16, causal=False))


def test_a_workspace_of_a_dtype_that_the_device_does_not_serve() -> None:
    with pytest.raises(UnsupportedError, match=r"dtype on CPU: got bfloat16; .*float32\. Pass --dtype float32"):
        workspace(problem=make_problem(8, 2, 64, 16, dtype="bfloat16"))


def test_plans_take_turns_in_the_host_buffers() -> None:
    """The fifth plan writes where the first did, which is no longer valid."""
    space = workspace()
    for turn in range(9):
        made = plan(space, (2, *[1] * (turn % 3)))
        assert made.prefill.num_work == 1 + turn % 3
        assert sorted(made.prefill.work[: made.prefill.num_work, 0].tolist()) == [*range(1 + turn % 3)]


def test_kernels_are_looked_up_once_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys are long to hash; and a plan of each part has its own."""
    asked: list[KernelKey] = []
    monkeypatch.setattr(KERNELS, "get", lambda key: asked.append(key) or (lambda *_: key))
    space = workspace()
    for _ in range(3):
        made = plan(space, (1, 5))
        for part, kind in ((made.decode, "decode"), (made.prefill, "prefill")):
            assert part.kernel().kind == kind
    assert sorted(key.kind for key in asked) == ["decode", "prefill"]
    with forced_splits(2):
        split = plan(space, (1,)).decode
    assert split.combine().kind == "decode_combine"
    assert (split.kernel().config.split, made.decode.kernel().config.split) == (True, False)
    assert made.decode.combine is None


def test_kernels_that_cannot_be_had_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    space = workspace()
    with monkeypatch.context() as patch:
        patch.setattr(KERNELS, "get", lambda key: (_ for _ in ()).throw(EnvironmentProblemError("no compiler")))
        with pytest.raises(EnvironmentProblemError):
            plan(space, (1,))
    monkeypatch.setattr(KERNELS, "get", lambda key: key.kind)
    assert plan(space, (1,)).decode.kernel == "decode"


def test_a_workspace_takes_an_equal_problem() -> None:
    equal = replace(SMALL)
    assert equal is not SMALL
    assert plan(workspace(), (1, 5), problem=equal).prefill is not None
