"""Engines of these tests. Each takes half a minute to start on two cores, so tests share them; one lives at a time."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tl_backend.cli.demo_launches import read_counts
from tl_backend.settings import PREFIX
from tl_backend.testing.checkpoint import write_checkpoint
from tl_backend.testing.server import VllmServer

HERE = Path(__file__).parent
ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "OMP_NUM_THREADS": "2",
}
# Two float32 attentions add in different orders: 5.5e-6 was the largest difference seen.
LOGPROB_TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def gqa7_model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("gqa7"), num_q_heads=14, num_kv_heads=2, head_dim=32, seed=7)


@pytest.fixture(scope="session")
def qwen3_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    return write_checkpoint(folder, architecture="qwen3", num_q_heads=4, num_kv_heads=2, head_dim=64, seed=3)


@pytest.fixture(scope="session")
def run_llm(tmp_path_factory):
    """Runs llm_child.py or another program; returns its result and the launches of all processes by kernel."""

    def run(model, backend, env=None, program="llm_child.py", **task):
        folder = tmp_path_factory.mktemp("llm")
        paths = [folder / name for name in ("task.json", "result.json", "log.txt")]
        paths[0].write_text(json.dumps({"model": str(model), "backend": backend, **task}))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        env = inherited | ENV | {"TL_BACKEND_LAUNCH_LOG_DIR": str(folder / "launches")} | (env or {})
        command = [sys.executable, str(HERE / program), str(paths[0]), str(paths[1])]
        with paths[2].open("wb") as log:
            child = subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=500, check=False)
        assert child.returncode == 0, paths[2].read_text()[-8000:]
        return json.loads(paths[1].read_text()), read_counts(Path(env["TL_BACKEND_LAUNCH_LOG_DIR"]))

    return run


@pytest.fixture(scope="session")
def run_server(tmp_path_factory):
    """Starts ``vllm serve``, gives its VllmServer to a function; returns what that returns, and the launches."""

    def run(model, backend, use, env=None, args=()):
        folder = tmp_path_factory.mktemp("serve")
        env = ENV | {"TL_BACKEND_LAUNCH_LOG_DIR": str(folder / "launches")} | (env or {})
        with VllmServer(model, backend=backend, env=env, args=args, log_path=folder / "log.txt") as server:
            server.wait_healthy()
            result = use(server)
            return result, read_counts(folder / "launches", after=time.time())

    return run


@pytest.fixture(scope="session")
def fault_env(tmp_path_factory):
    """Variables under which vLLM's processes load faults.py, as a plugin that is installed in no environment."""
    folder = tmp_path_factory.mktemp("faults")
    shutil.copy(HERE / "faults.py", folder / "attention_faults.py")
    info = folder / "attention_faults-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attention-faults\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nattention_faults = attention_faults:plant\n")
    (folder / "fault").write_text("")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {"PYTHONPATH": path, "ATTENTION_FAULT_FILE": str(folder / "fault")}


@pytest.fixture(scope="session")
def compare():
    """What differs between the answers of two engines to the same prompts, as messages; empty if nothing does."""

    def differences(actual, expected):
        assert len(actual) == len(expected)
        return [
            message
            for number, (a, e) in enumerate(zip(actual, expected, strict=True))
            for message in _differences(number, a, e)
        ]

    return differences


def _differences(number, actual, expected):
    if actual["tokens"] != expected["tokens"]:
        yield f"prompt {number}: tokens {actual['tokens']} instead of {expected['tokens']}"
        return
    error = max(abs(a - e) for a, e in zip(actual["logprobs"], expected["logprobs"], strict=True))
    if error > LOGPROB_TOLERANCE:
        yield f"prompt {number}: a log-probability is off by {error:.2e} > {LOGPROB_TOLERANCE:.0e}"
