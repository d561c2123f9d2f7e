"""The matmul on the C target against float64: odd sizes, poison around the operands; and its refusals."""

import math

import pytest
import torch

from tl_backend.configs.gemm import GemmConfig, GemmProblem, gemm_configs
from tl_backend.device import DeviceSpec
from tl_backend.errors import InvalidInputError, UnsupportedError
from tl_backend.ops.gemm import gemm, gemm_key
from tl_backend.testing.poison_judge import relative_rms

TOLERANCE = 1e-6  # float32 sums of at most a hundred terms
CPU = DeviceSpec.absent("c")
SMALL = GemmConfig(block_m=16, block_n=32, block_k=16, num_stages=0, threads=1, panel=1)


def among_nan(rows: int, columns: int) -> torch.Tensor:
    """A dense random matrix in the midst of NaN: what is read past its end shows."""
    buffer = torch.full((16 + rows * columns + 4096,), math.nan)
    matrix = buffer[16 : 16 + rows * columns].view(rows, columns)
    return matrix.copy_(torch.randn(rows, columns))


@pytest.mark.parametrize(
    ("m", "n", "k"), [(64, 96, 64), (33, 65, 31), (1, 1, 1), (7, 100, 90), (100, 3, 32)], ids="{0}".format
)
@pytest.mark.parametrize("config", [None, SMALL], ids=["default", "small"])
def test_product_is_that_of_float64(m: int, n: int, k: int, config: GemmConfig | None) -> None:
    a, b = among_nan(m, k), among_nan(n, k)
    store = torch.full((m * n + 4096,), math.nan)
    out = store[: m * n].view(m, n)
    assert gemm(a, b, out=out, config=config) is out
    assert relative_rms(out, a.double() @ b.double().T) < TOLERANCE
    assert store[m * n :].isnan().all()


def test_an_output_is_made() -> None:
    a = torch.randn(20, 8)
    torch.testing.assert_close(gemm(a, a), a @ a.T)


def test_nan_and_infinity_stay_where_they_are() -> None:
    a, b = torch.ones(40, 33), torch.ones(40, 33)
    a[7, 32], b[39, 0] = math.nan, math.inf
    out = gemm(a, b)
    assert out[7].isnan().all()
    assert (out[:7, 39] == math.inf).all()
    assert (out[:7, :39] == 33).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": torch.zeros(4, 9)}, "b shape"),
        ({"out": torch.zeros(5, 5)}, "out shape"),
        ({"a": torch.zeros(8, 5).T}, "a strides"),
        ({"out": torch.zeros(5, 4, dtype=torch.float64)}, "out dtype"),
        ({"a": torch.zeros(5)}, "a shape"),
        ({"a": torch.zeros(41)[1:].view(5, 8)}, "a strides"),
        ({"a": torch.zeros(0, 8), "out": torch.zeros(0, 4)}, "every extent is at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_arguments_are_refused(change, message: str) -> None:
    given = {"a": torch.zeros(5, 8), "b": torch.zeros(4, 8), "out": torch.zeros(5, 4)} | change
    with pytest.raises(InvalidInputError, match=message):
        gemm(given["a"], given["b"], out=given["out"])


def test_what_a_device_cannot_run_is_refused_by_name() -> None:
    problem = GemmProblem(m=64, n=64, k=64, dtype="float16")
    with pytest.raises(UnsupportedError, match=r"matmul dtype on CPU: got float16; .*float32"):
        gemm_key(problem, SMALL, CPU)
    huge = GemmConfig(block_m=256, block_n=256, block_k=64, num_stages=4, threads=256, panel=8)
    with pytest.raises(UnsupportedError, match="needs 262208 bytes of shared memory; sm_90 has 232448"):
        gemm_key(problem, huge, DeviceSpec.absent("sm_90"))
    with pytest.raises(UnsupportedError, match=r"fewer than 2\*\*31 elements"):
        GemmProblem(m=2**16, n=2**15, k=1, dtype="float16")
    with pytest.raises(UnsupportedError, match="matmul dtype: got float8"):
        GemmProblem(m=1, n=1, k=1, dtype="float8_e4m3fn")


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120", "gfx90a", "gfx942", "gfx950", "c"])
def test_every_device_has_a_config(arch: str) -> None:
    device = DeviceSpec.absent(arch)
    configs = gemm_configs(GemmProblem(m=8192, n=8192, k=8192, dtype=device.dtypes[-1]), device)
    assert configs
    assert len(set(configs)) == len(configs)
