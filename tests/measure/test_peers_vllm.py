"""The peer's arguments are those of vLLM's Triton attention: its kernel runs on them and answers right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tl_backend.measure.peer import NotThereError
from tl_backend.measure.peers_vllm import triton_arguments
from tl_backend.measure.workload import Batch, Workload
from tl_backend.testing.cases import make_problem

ROOT = Path(__file__).parents[2]


def test_the_kernel_answers_right_with_every_feature() -> None:
    pytest.importorskip("vllm")
    command = [sys.executable, str(Path(__file__).with_name("triton_child.py"))]
    env = {**os.environ, "PYTHONPATH": "."}
    child = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    errors = json.loads(child.stdout.splitlines()[-1])
    assert len(errors) == 8
    assert max(errors.values()) < 1e-5, errors


def test_contiguous_keys_that_no_page_divides_are_refused() -> None:
    workload = Workload(name="a test", problem=make_problem(4, 2, 32, None), query_lens=(24,), seq_lens=(24,))
    batch = Batch(workload, torch.device("cpu"))
    with pytest.raises(NotThereError, match="pages are of 16 keys at least"):
        triton_arguments(batch, batch.new_out())
