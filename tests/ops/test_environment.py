"""What is missing is said before anything is compiled: the value, the limit, the remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
import torch

from tl_backend.device import DeviceSpec
from tl_backend.errors import EnvironmentProblemError
from tl_backend.ops import compiled, environment, paged_attention
from tl_backend.ops.compiled import KernelCache
from tl_backend.ops.environment import environment_problem

CPU = DeviceSpec.of(torch.device("cpu"))
H200 = DeviceSpec.absent("sm_90")
MI300 = DeviceSpec.absent("gfx942")


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has compiled nothing yet."""
    from tl_backend.ops import decode, prefill

    for module in (compiled, decode, prefill):
        monkeypatch.setattr(module, "KERNELS", KernelCache())


def attend() -> torch.Tensor:
    return paged_attention(
        torch.zeros(2, 2, 32),
        torch.zeros(1, 1, 16, 64),
        torch.zeros(1, 1).int(),
        torch.tensor([0, 2]).int(),
        torch.tensor([2]).int(),
        max_seqlen_q=2,
        max_seqlen_k=2,
    )


def test_nothing_is_missing_here() -> None:
    assert environment_problem(CPU) is None


def test_missing_tilelang(monkeypatch: pytest.MonkeyPatch, no_kernels) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "tilelang" else find_spec(name, *a)
    )
    with pytest.raises(EnvironmentProblemError) as caught:
        attend()
    assert str(caught.value) == (
        "TileLang: got no such package; 0.1.15 or newer is needed for target c. Run pip install 'tilelang>=0.1.15'."
    )


@pytest.mark.parametrize(
    ("version", "device", "message"),
    [
        ("0.1.14", CPU, "TileLang: got 0.1.14; 0.1.15 or newer is needed for target c"),
        ("0.1.11", H200, "TileLang: got 0.1.11; 0.1.12 or newer is needed for target sm_90"),
        ("0.1.9+cuda", H200, "TileLang: got 0.1.9"),
    ],
)
def test_too_old_a_tilelang(monkeypatch: pytest.MonkeyPatch, version: str, device, message: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert environment_problem(device).startswith(message)


@pytest.mark.parametrize("version", ["0.1.15", "0.1.15.post1", "0.2.0", "1.0", "0.1.15+cu130"])
def test_new_enough_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert environment_problem(CPU) is None


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_kernels) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CXX", "CC"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(EnvironmentProblemError) as caught:
        attend()
    message = str(caught.value)
    assert message.startswith("compiler: got no g++ or clang++ or c++; TileLang needs one to compile for target c.")
    assert "apt-get install g++" in message


def test_a_compiler_that_is_named_and_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++-that-is-not-there")
    assert str(environment_problem(CPU)).startswith("compiler: got no g++-that-is-not-there; ")
    monkeypatch.delenv("CXX")
    assert environment_problem(CPU) is None


@pytest.mark.parametrize(
    ("device", "compiler", "variable"), [(H200, "nvcc", "CUDA_HOME"), (MI300, "hipcc", "ROCM_PATH")]
)
def test_missing_gpu_toolkit(monkeypatch, tmp_path: Path, device, compiler: str, variable: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(environment, "_TOOLKITS", {"nvidia": (), "amd": ()})
    message = environment_problem(device)
    assert message.startswith(f"compiler: got no {compiler}")
    assert variable in message


def test_a_toolkit_outside_the_path_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CASES.md C17: CUDA_HOME with a leading colon has been seen too."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(environment, "_TOOLKITS", {"nvidia": ("", f":{tmp_path}")})
    assert environment_problem(H200) is None
