"""Ceilings: both programs measured, the higher counts, and a wrong or failing kernel costs itself alone."""

import pytest
import torch

from tl_backend.device import DeviceSpec
from tl_backend.measure import ceilings as module
from tl_backend.measure.ceilings import Ceilings, ceiling_kernels, ceilings

CPU = torch.device("cpu")


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MATMUL_SIZE", {"cpu": 32})
    monkeypatch.setattr(module, "COPY_BYTES", {"cpu": 4096})


@pytest.mark.usefixtures("_small")
def test_both_programs_are_measured_and_the_higher_counts() -> None:
    found = ceilings(CPU)
    assert found.errors == {}
    for rates, ceiling in ((found.matmul, found.matmul_tflops), (found.copy, found.copy_tbps)):
        assert rates.keys() == {"tilelang", "torch"}
        assert ceiling == max(rates.values()) > 0
    assert found.dtype == "float32"
    assert found.best["matmul"].startswith("GemmConfig(")
    assert found.best["copy"].startswith("CopyConfig(")


@pytest.mark.usefixtures("_small")
def test_a_wrong_answer_and_a_failure_are_named_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args, **kwargs):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(module, "gemm", lambda a, b, out, config: out.fill_(1.0))
    monkeypatch.setattr(module, "copy", fail)
    found = ceilings(CPU)
    assert found.matmul.keys() == found.copy.keys() == {"torch"}
    said = sorted(set(found.errors.values()))
    assert said[0] == "RuntimeError: no such kernel"
    assert said[1].startswith("its product is off by")
    assert found.best == {"matmul": "none", "copy": "none"}


def test_the_least_time_is_that_of_the_tighter_ceiling() -> None:
    found = Ceilings(matmul_tflops=500.0, copy_tbps=4.0, dtype="bfloat16", matmul={}, copy={}, best={})
    assert found.least_ms(flops=5e11, num_bytes=4e6) == pytest.approx(1.0)
    assert found.least_ms(flops=5e8, num_bytes=4e9) == pytest.approx(1.0)


def test_all_its_kernels_are_known_before() -> None:
    keys = ceiling_kernels(DeviceSpec.absent("sm_90"), "bfloat16")
    assert {key.kind for key in keys} == {"gemm", "copy"}
    assert len(set(keys)) == len(keys) > 4
