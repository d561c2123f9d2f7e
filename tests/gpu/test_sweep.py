"""The GPU sweep under pytest, and what of it holds without a GPU. ``python -m tests.gpu.sweep`` is the same code."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from tests.gpu.extremes import extremes
from tests.gpu.families import forced_family, of_family, strangers
from tests.gpu.sweep import check_extreme, check_work, everything, keys, main
from tl_backend.configs import choice
from tl_backend.configs.prefill import default_prefill_config
from tl_backend.configs.prefill_hopper import HEAD_DIMS, hopper_refusal
from tl_backend.device import DeviceSpec
from tl_backend.ops.prepare import load_kernels
from tl_backend.problem import SUPPORTED_HEAD_DIMS
from tl_backend.testing.problems import CPU_PROBLEMS, gpu_problems, gpu_work, name

CPU = torch.device("cpu")
GPU = torch.device("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# More would not compile in seven minutes on 16 cores.
MAX_KERNELS = 400
WORK, EXTREMES = gpu_work(), extremes("bfloat16")


@pytest.fixture(scope="module")
def compiled() -> None:
    """All kernels, side by side."""
    assert load_kernels(keys(*everything(GPU), DeviceSpec.of(GPU))) == {}


@needs_gpu
@pytest.mark.parametrize("work", WORK, ids=[name(work.problem) for work in WORK])
def test_problem(compiled, work) -> None:
    assert [str(row) for row in check_work(work, GPU) if row.message] == []


@needs_gpu
@pytest.mark.parametrize("extreme", EXTREMES, ids=[extreme.name for extreme in EXTREMES])
def test_extreme(compiled, extreme) -> None:
    row = check_extreme(extreme, GPU)
    assert not row.message, str(row)


def test_there_are_160_problems_of_both_dtypes() -> None:
    problems = gpu_problems()
    assert len(set(problems)) == len(problems) == 160
    for field, least in (("dtype", 60), ("causal", 40)):
        values = [getattr(problem, field) for problem in problems]
        assert all(values.count(value) >= least for value in set(values)), field


@pytest.mark.parametrize(
    "fields",
    [
        ("head_dim", "group_size"),
        ("head_dim", "page_size"),
        *itertools.product(("head_dim", "group_size", "page_size"), ("dtype", "causal")),
        ("dtype", "causal"),
    ],
    ids=str,
)
def test_every_pair_of_values_occurs(fields: tuple[str, str]) -> None:
    found = {tuple(getattr(problem, field) for field in fields) for problem in gpu_problems()}
    values = [{getattr(problem, field) for problem in gpu_problems()} for field in fields]
    assert found == set(itertools.product(*values))


def test_every_kind_meets_every_head_size_ratio_and_page_size() -> None:
    for kind in ("prefill", "decode", "decode_split"):
        problems = [work.problem for work in gpu_work()[: len(gpu_problems())] if kind in work.kinds]
        assert {problem.head_dim for problem in problems} == set(SUPPORTED_HEAD_DIMS)
        assert {problem.group_size for problem in problems} == {1, 2, 3, 5, 7, 8, 12, 24, 71}
        assert {problem.page_size for problem in problems} >= {16, 48, 64, 96, 128, 272, 544, 4352}
        assert len({(problem.dtype, problem.causal) for problem in problems}) == 4


def test_the_kernels_are_few_enough() -> None:
    wanted = keys(gpu_work(), extremes("bfloat16"), DeviceSpec.absent("sm_90"))
    assert len(wanted) <= MAX_KERNELS


HOPPER = DeviceSpec.absent("sm_90")


def test_a_familys_run_has_what_the_family_takes_and_all_of_its_prefills() -> None:
    work, more = of_family("hopper", WORK, EXTREMES, HOPPER)
    assert (work, more) == of_family("portable", WORK, EXTREMES, HOPPER)
    assert len(work) >= 50
    assert {item.problem for item in (*work, *more)} == {
        item.problem
        for item in (*WORK, *EXTREMES)
        if "prefill" in item.kinds and hopper_refusal(item.problem, HOPPER) is None
    }
    assert of_family("default", WORK, EXTREMES, HOPPER) == (WORK, EXTREMES)
    assert of_family("hopper", WORK, EXTREMES, DeviceSpec.absent("sm_80")) == ([], [])


def test_a_familys_run_has_each_head_size_with_each_feature_group_and_page() -> None:
    problems = [work.problem for work in of_family("hopper", WORK, [], HOPPER)[0]]
    for head_dim in HEAD_DIMS:
        own = [problem for problem in problems if problem.head_dim == head_dim]
        assert len({problem.group_size for problem in own}) >= 4
        assert len({problem.page_size for problem in own}) >= 4
        assert {problem.dtype for problem in own} == {"float16", "bfloat16"}
        assert any(problem.window or problem.soft_cap for problem in own)
    for feature in ("window", "soft_cap", "sinks_dtype", "returns_lse"):
        assert len({problem.head_dim for problem in problems if getattr(problem, feature)}) >= 4, feature
    assert sum(not problem.causal for problem in problems) >= 5


def test_the_portable_family_is_forced_on_every_prefill() -> None:
    work, _ = of_family("portable", WORK, [], HOPPER)
    with forced_family("portable"):
        forced = {item.problem: choice.default_config("prefill", item.problem, HOPPER) for item in work}
        kinds = {key.kind for key in keys(work, [], HOPPER)}
    assert forced == {problem: default_prefill_config(problem, HOPPER) for problem in forced}
    assert "prefill" in kinds
    assert "prefill_hopper" not in kinds


def test_a_run_of_a_family_without_its_launches_is_a_miss() -> None:
    assert strangers("hopper", {"prefill_hopper": 3, "decode": 1}) == strangers("portable", {"prefill": 1}) == ""
    assert "0 launches of prefill_hopper and 2 of prefill" in strangers("hopper", {"prefill": 2})
    assert "3 launches of prefill and 1 of prefill_hopper" in strangers("portable", {"prefill": 3, "prefill_hopper": 1})
    assert strangers("default", {}) == ""


def test_the_cpu_sweep_has_what_the_issue_asks_for() -> None:
    assert {problem.head_dim for problem in CPU_PROBLEMS} == set(SUPPORTED_HEAD_DIMS)
    assert {problem.group_size for problem in CPU_PROBLEMS} >= {1, 2, 3, 5, 7, 8, 12, 24, 71}
    assert {problem.page_size for problem in CPU_PROBLEMS} >= {16, 48, 64, 96, 128, 272, 544, 4352}


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    assert main(["--device", "cpu", "--only", "D48", "--processes", "2", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["missed"] == 0
    assert written["checks"] == len(written["rows"]) == 6
    assert written["worst"]["float32"] <= 1e-5
    assert {"device", "driver", "torch", "cuda", "tilelang", "date"} <= written.keys()
    assert capsys.readouterr().out.count("\nok ") == 6


def test_a_family_that_the_device_has_nothing_of_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--family", "hopper"])
    assert "--family hopper and --only '' leave nothing on this device" in capsys.readouterr().err


def test_a_miss_is_counted_and_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from tl_backend.testing import poison_judge

    monkeypatch.setitem(poison_judge.TOLERANCES, "float32", 1e-12)
    monkeypatch.setattr("tests.gpu.sweep.load_kernels", lambda *args, **kwargs: {})
    out = tmp_path / "rows.json"
    assert main(["--device", "cpu", "--only", "D48", "--out", str(out)]) == 1
    assert json.loads(out.read_text())["missed"] == 2
    assert "MISS" in capsys.readouterr().out


DRY = (
    "A2 block ids beyond the limit, page 16",
    "A5",
    "A1 A3",
    "A4 65537",
    "A10 zero-length queries, causal",
    "A12",
    "A33",
    "A40",
)


@pytest.mark.parametrize(
    "extreme", [extreme for extreme in extremes("float32") if extreme.name.startswith(DRY)], ids=lambda e: e.name
)
def test_extremes_run_on_the_c_target(extreme) -> None:
    row = check_extreme(extreme, CPU)
    assert not row.message, str(row)
