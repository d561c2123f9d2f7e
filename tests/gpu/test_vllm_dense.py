"""What of ``tests.gpu.vllm_dense`` holds without a GPU and without vLLM's test file: its jobs, and how it judges."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.vllm_dense import FILES, LAYOUTS, MAY_FAIL, MODELS, Job, folder_problem, jobs, main, summary
from tests.gpu.vllm_dense_child import MASKS, stand_in_for_pytest

# Stands in for vLLM's file: as much of it as a process of a backend that is not TileLang's asks for.
FAKE_FILE = """
import os
from types import SimpleNamespace

import pytest
import torch

from tests.v1.attention.utils import BatchSpec

DEVICE_TYPE = "cpu"
AttentionBackendEnum = {"FAKE": SimpleNamespace(get_class=lambda: FakeBackend)}
BATCH_SPECS = {"small_decode": BatchSpec([9, 5], off=0.0), "small_prefill": BatchSpec([9, 5], off=1.0)}


class FakeBackend:
    supports_kv_cache_dtype = staticmethod(lambda name: name == "fp8_e4m3")


def ModelConfig(model, max_model_len, dtype):
    assert os.path.exists(model + "/config.json") and max_model_len == 9
    return SimpleNamespace(dtype=dtype, get_sliding_window=lambda: None)


def _convert_dtype_to_torch(dtype):
    return torch.float32


def _test_backend_correctness(batch, model, backends, mask, *, kv_cache_dtype="auto"):
    if kv_cache_dtype == "fp8_e4m3":
        os._exit(3)
    torch.testing.assert_close(torch.ones(4) + batch.off, torch.ones(4))
"""
FAKE_UTILS = """
class BatchSpec:
    def __init__(self, seq_lens, off):
        self.seq_lens, self.off = seq_lens, off
"""


def rows(*states: str, group: str = "causal") -> list[dict[str, Any]]:
    return [asdict(Job(group, f"batch {i}", "qwen3", state=state, max_abs=1e-3)) for i, state in enumerate(states)]


def test_jobs_name_models_and_masks_and_each_is_there_once() -> None:
    found = jobs()
    assert len({str(job) for job in found}) == len(found)
    assert {job.model for job in found} == set(MODELS)
    assert {job.mask for job in found} == set(MASKS)
    assert set(MAY_FAIL) < {job.group for job in found}
    assert {job.arguments["layout"] for job in found if "layout" in job.arguments} == set(LAYOUTS)
    assert {str(job) for job in jobs("^window, .*decode$")} == {"window, small_decode", "window, large_decode"}


def test_a_rank_has_its_part_of_the_heads() -> None:
    heads = {name: (shape["num_attention_heads"], shape["num_key_value_heads"]) for name, shape in MODELS.items()}
    assert [heads[name] for name in ("qwen3", "qwen3 rank of 2", "qwen3 rank of 4")] == [(16, 8), (8, 4), (4, 2)]
    assert [heads[name] for name in ("windowed", "windowed rank of 2", "windowed rank of 4")] == [
        (16, 4),
        (8, 2),
        (4, 1),
    ]


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        ("causal", ["1111.", "11111"]),
        ("window", ["..11.", "...11"]),
        ("both sides", ["..111", "...11"]),
        ("none", ["11111", "11111"]),
    ],
)
def test_masks(mask: str, seen: list[str]) -> None:
    """Two queries after three keys, and a window of two."""
    q, k = torch.arange(2)[:, None], torch.arange(5)[None]
    got = MASKS[mask](0, 0, q, k, context_len=3, window=2).expand(2, 5)
    assert ["".join("1" if each else "." for each in row) for row in got.tolist()] == seen


def test_a_stand_in_serves_where_pytest_is_absent() -> None:
    stand_in = stand_in_for_pytest()

    def function() -> None: ...

    assert stand_in.mark.parametrize("name", [1, 2])(function) is function
    assert stand_in.mark.skipif(False, reason="none")(function) is function
    assert stand_in.__spec__.name == "pytest"
    with pytest.raises(stand_in.skip.Exception, match="no such cache"):
        stand_in.skip("no such cache")


def test_summary_counts_by_group_and_backend() -> None:
    ours = {"rows": rows("passed", "passed") + rows("passed", "skipped", group="window"), "exit": 0}
    peer = {"rows": rows("passed", "failed") + rows("not run", "not run", group="window"), "exit": -6, "error": "abort"}
    text, code = summary({"TILELANG": ours, "TRITON_ATTN": peer})
    lines = text.splitlines()
    assert lines[0].split()[-2:] == ["TILELANG", "TRITON_ATTN"]
    assert lines[1].split() == ["causal", "2/2", "(1.0e-03)", "1/2", "(1.0e-03)"]
    assert lines[2].split() == ["window", "1/2", "(1.0e-03)", "0/2"]
    assert "TILELANG: 3 passed, 1 skipped" in lines
    assert "TRITON_ATTN: exit -6: abort" in lines
    assert code == 1  # By the job that was skipped.


@pytest.mark.parametrize("state", ["failed", "skipped", "compared nothing", "not run", "ended the process"])
def test_a_job_of_ours_that_did_not_pass_ends_with_1(state: str) -> None:
    assert summary({"TILELANG": {"rows": rows("passed", state), "exit": 0}})[1] == 1
    assert summary({"TILELANG": {"rows": rows("passed", "passed"), "exit": 0}})[1] == 0
    may_fail = rows("passed") + rows(state, group=MAY_FAIL[0])
    assert summary({"TILELANG": {"rows": may_fail, "exit": 0}})[1] == 0
    peer = {"TRITON_ATTN": {"rows": rows(state), "exit": 0}}
    assert summary(peer | {"TILELANG": {"rows": rows("passed"), "exit": 0}})[1] == 0


def test_a_folder_without_the_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--out", str(tmp_path / "out.json")])
    said = capsys.readouterr().err
    assert f"FOLDER: got {tmp_path}, without {FILES[0]} and {FILES[1]}; it must hold vLLM's test file" in said
    assert "Name a checkout of vLLM at the tag" in said
    (tmp_path / FILES[1]).parent.mkdir(parents=True)
    (tmp_path / FILES[1]).touch()
    assert f"without {FILES[0]}; " in str(folder_problem(tmp_path))
    (tmp_path / FILES[0]).touch()
    assert folder_problem(tmp_path) is None
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--out", str(tmp_path / "out.json"), "--only", "no such job"])
    assert "leaves none of" in capsys.readouterr().err


def test_a_process_that_ends_leaves_the_results_before_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in zip(FILES, (FAKE_FILE, FAKE_UTILS), strict=True):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    out = tmp_path / "out.json"
    only = "^causal(| fp8.*), small_"
    assert main([str(tmp_path), "--backends", "FAKE", "--only", only, "--out", str(out)]) == 0  # None of ours.
    written = json.loads(out.read_text())["results"]["FAKE"]
    assert json.loads((tmp_path / "out.FAKE.json").read_text())["rows"] == written["rows"]
    assert written["exit"] == 3
    assert [(row["group"], row["batch"], row["state"]) for row in written["rows"]] == [
        ("causal", "small_decode", "passed"),
        ("causal", "small_prefill", "failed"),
        ("causal fp8", "small_decode", "skipped"),
        ("causal fp8", "small_prefill", "skipped"),
        ("causal fp8_e4m3", "small_decode", "ended the process"),
        ("causal fp8_e4m3", "small_prefill", "not run"),
    ]
    assert (written["rows"][0]["max_abs"], written["rows"][1]["max_abs"]) == (0.0, 1.0)
    assert "FAKE: causal, small_prefill: failed: AssertionError: Tensor-likes are not close!" in capsys.readouterr().out
