"""What the demo needs from the machine, and how it serves on it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from tl_backend.device import DeviceSpec
from tl_backend.errors import EnvironmentProblemError, describe

MAX_MODEL_LEN = 512
INSTALL = "Run `make demo`, which installs it, or see README.md."


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where the demo serves.

    Attributes:
        name: for the reader.
        args: arguments of both servers.
        env: variables of both servers.
        tilelang_env: variables of the server on TileLang alone.
    """

    name: str
    args: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    tilelang_env: Mapping[str, str] = field(default_factory=dict)


def find_machine() -> Machine:
    """The GPU if there is one, the CPU otherwise.

    Raises:
        EnvironmentProblemError: vLLM, TileLang, a compiler for its kernels or this package's entry point is missing.
        UnsupportedError: a GPU that the kernels do not serve.
    """
    _check_packages()
    import torch

    from tl_backend.ops.environment import environment_problem

    has_gpu = torch.cuda.is_available()
    if reason := environment_problem(DeviceSpec.of(torch.device("cuda" if has_gpu else "cpu"))):
        raise EnvironmentProblemError(reason)
    common = ("--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "8")
    if has_gpu:
        # float16: its rounding is well below the gaps between the model's best two logits. A fifth of the GPU is ample.
        args = ("--dtype", "float16", "--gpu-memory-utilization", "0.2")
        return Machine(name=torch.cuda.get_device_name(), args=common + args)
    return Machine(
        name=f"CPU, {os.cpu_count()} cores",
        args=(*common, "--dtype", "float32", "--block-size", "128"),
        env={"VLLM_CPU_KVCACHE_SPACE": "1"},  # GiB
        tilelang_env={"TL_BACKEND_CPU": "1"},
    )


def _check_packages() -> None:
    for module in ("vllm", "torch"):
        if importlib.util.find_spec(module) is None:
            raise EnvironmentProblemError(
                describe(module, value="no such package", limit=f"{sys.executable} must have it", remedy=INSTALL)
            )
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    if not any(plugin.value.startswith("tl_backend.") for plugin in plugins):
        raise EnvironmentProblemError(
            describe(
                "tl-backend",
                value="no entry point",
                limit="vLLM finds its plugins among installed packages",
                remedy=f"Run {sys.executable} -m pip install --no-deps -e . in this checkout.",
            )
        )
