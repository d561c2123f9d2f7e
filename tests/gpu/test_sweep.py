"""The GPU sweep under pytest, and what of it holds without a GPU. ``python -m tests.gpu.sweep`` is the same code."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from tests.gpu.extremes import extremes
from tests.gpu.sweep import check_extreme, check_work, everything, keys, main
from tl_backend.device import DeviceSpec
from tl_backend.ops.prepare import fill_disk_cache
from tl_backend.problem import SUPPORTED_HEAD_DIMS
from tl_backend.testing.problems import CPU_PROBLEMS, gpu_problems, gpu_work, name

CPU = torch.device("cpu")
GPU = torch.device("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# More would not compile in six minutes on 16 cores.
MAX_KERNELS = 330
WORK, EXTREMES = gpu_work(), extremes("bfloat16")


@pytest.fixture(scope="module")
def compiled() -> None:
    """All kernels, side by side, in the disk cache."""
    assert fill_disk_cache(keys(*everything(GPU), DeviceSpec.of(GPU))) == {}


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


def test_a_miss_is_counted_and_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from tl_backend.testing import poison

    monkeypatch.setitem(poison.TOLERANCES, "float32", 1e-12)
    monkeypatch.setattr("tests.gpu.sweep.fill_disk_cache", lambda *args, **kwargs: {})
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
