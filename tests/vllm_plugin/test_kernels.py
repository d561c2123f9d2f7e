"""vLLM's monitor of compilations sees none while requests are served, and sees one that is planted."""

import os
import subprocess
import sys

PROGRAM = """
import torch
from vllm.utils import jit_monitor

from tl_backend.errors import EnvironmentProblemError
from tl_backend.ops import prepare
from tl_backend.ops.compiled import KERNELS
from tl_backend.ops.prepare import required_kernels
from tl_backend.device import DeviceSpec
from tl_backend.testing.cases import Case, make_problem
from tl_backend.testing.poison import check_attention

CPU = torch.device("cpu")
problem, planted = make_problem(4, 2, 32, 16), make_problem(4, 2, 32, 48)
prepare([problem], CPU)
jit_monitor.activate(mode="error")
for num_splits in (1, 4):
    check_attention(problem, Case(query_lens=(1, 1, 9), seq_lens=(1, 50, 9), num_splits=num_splits), CPU)
print("served")
try:
    KERNELS.get(required_kernels(planted, DeviceSpec.of(CPU))[0])
except EnvironmentProblemError as error:
    print(error)
"""


def test_the_jit_monitor_passes_what_was_prepared_and_stops_a_planted_compilation(tmp_path):
    """``--jit-monitor-mode=error``, which ``--enforce-eager`` turns off: activated here as a worker does."""
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, check=False,
        env={**os.environ, "TL_BACKEND_CACHE_DIR": str(tmp_path), "TILELANG_CACHE_DIR": str(tmp_path / "tl")},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    served, error = [line for line in answer.stdout.splitlines() if line == "served" or "prefill" in line][-2:]
    assert served == "served"
    assert "TileLang JIT compilation during inference: prefill" in error
