"""What is missing is said before anything is compiled: the value, the limit, the remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
import torch

from tl_backend.device import DeviceSpec
from tl_backend.errors import EnvironmentProblemError
from tl_backend.ops import environment, paged_attention
from tl_backend.ops.environment import environment_problem

CPU = DeviceSpec.of(torch.device("cpu"))
H200 = DeviceSpec.absent("sm_90")
MI300 = DeviceSpec.absent("gfx942")


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


def test_missing_tilelang(monkeypatch: pytest.MonkeyPatch, fresh_kernels) -> None:
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


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_kernels) -> None:
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


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No CUDA and no ROCm, wherever this machine has them."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(environment, "_DEFAULT_HOMES", {})
    monkeypatch.setattr(environment, "_CUDA_WHEEL", "no-such-distribution")
    for variable in ("CUDA_HOME", "CUDA_PATH", "ROCM_PATH"):
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


def toolkit(folder: Path, compiler: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / compiler).touch(mode=0o755)
    return folder


GPUS = pytest.mark.parametrize(
    ("device", "compiler", "variable"), [(H200, "nvcc", "CUDA_HOME"), (MI300, "hipcc", "ROCM_PATH")]
)


@GPUS
def test_missing_gpu_toolkit(no_toolkit, device, compiler: str, variable: str) -> None:
    message = environment_problem(device)
    assert message.startswith(f"compiler: got no {compiler}")
    assert variable in message


@GPUS
def test_a_toolkit_outside_the_path_is_found(no_toolkit, tmp_path: Path, device, compiler: str, variable: str) -> None:
    no_toolkit.setenv(variable, str(toolkit(tmp_path / "kit", compiler)))
    assert environment_problem(device) is None
    no_toolkit.delenv(variable)
    no_toolkit.setattr(environment, "_DEFAULT_HOMES", {device.vendor: str(tmp_path / "kit")})
    assert environment_problem(device) is None


def test_a_wrong_cuda_home_is_named_though_nvcc_is_elsewhere(no_toolkit, tmp_path: Path) -> None:
    """CASES.md C17: TileLang looks there alone, so that a leading colon breaks the first compile."""
    kit = toolkit(tmp_path / "kit", "nvcc")
    no_toolkit.setenv("PATH", str(kit / "bin"))
    assert environment_problem(H200) is None
    no_toolkit.setenv("CUDA_HOME", f":{kit}")
    assert environment_problem(H200) == (
        f"CUDA_HOME: got {f':{kit}'!r}; TileLang looks for bin/nvcc in that folder and nowhere else. "
        "Set CUDA_HOME to the folder that holds bin/nvcc, or unset it."
    )
    assert environment_problem(MI300).startswith("compiler: got no hipcc")


def test_nvcc_of_the_wheel_is_found(no_toolkit, tmp_path: Path) -> None:
    kit = toolkit(tmp_path / "nvidia" / "cu13", "nvcc")
    info = tmp_path / "toy_nvcc-13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-nvcc\nVersion: 13.0\n")
    (info / "RECORD").write_text("nvidia/cu13/bin/nvcc,,\n")
    no_toolkit.syspath_prepend(tmp_path)
    no_toolkit.setattr(environment, "_CUDA_WHEEL", "toy-nvcc")
    assert environment.find_compiler("nvidia") == kit / "bin" / "nvcc"
