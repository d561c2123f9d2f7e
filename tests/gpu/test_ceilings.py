"""The matmul and the copy on a GPU: every config, sizes that tiles do not divide, more bytes than 32 bits count."""

import pytest
import torch

from tl_backend.configs.copy import copy_configs
from tl_backend.configs.gemm import GemmConfig, GemmProblem, gemm_configs
from tl_backend.device import DeviceSpec
from tl_backend.measure.ceilings import TOLERANCE, ceilings
from tl_backend.ops.copy import copy
from tl_backend.ops.gemm import gemm
from tl_backend.testing.poison_judge import relative_rms

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = torch.device("cuda")


def check_product(problem: GemmProblem, config: GemmConfig) -> None:
    dtype = getattr(torch, problem.dtype)
    a, b = (torch.randn(rows, problem.k, device=DEVICE).to(dtype) for rows in (problem.m, problem.n))
    out = torch.full((problem.m, problem.n), torch.nan, device=DEVICE, dtype=dtype)
    gemm(a, b, out=out, config=config)
    assert relative_rms(out, a.double() @ b.double().T) <= TOLERANCE, config


def test_every_config_answers_right() -> None:
    problem = GemmProblem(m=512, n=768, k=512, dtype="bfloat16")
    for config in gemm_configs(problem, DeviceSpec.of(DEVICE)):
        check_product(problem, config)


# One step of the pipeline; elements that fill vectors, and that do not.
@pytest.mark.parametrize(("m", "n", "k"), [(256, 256, 64), (1000, 200, 72), (129, 257, 65), (1, 3, 5)])
def test_sizes_that_tiles_do_not_divide(m: int, n: int, k: int) -> None:
    problem = GemmProblem(m=m, n=n, k=k, dtype="float16")
    check_product(problem, gemm_configs(problem, DeviceSpec.of(DEVICE))[0])


@pytest.mark.parametrize("num_words", [1, 4095, 4096, 123_457])
def test_every_config_copies_all_and_no_more(num_words: int) -> None:
    source = torch.randint(-(2**31), 2**31, (num_words,), device=DEVICE).int()
    for config in copy_configs(DeviceSpec.of(DEVICE)):
        store = torch.full((num_words + 65536,), 7, dtype=torch.int32, device=DEVICE)
        copy(source, store[:num_words], config=config)
        assert torch.equal(store[:num_words], source), config
        assert bool((store[num_words:] == 7).all()), config


def test_a_copy_of_more_than_32_bits_of_words() -> None:
    source = torch.arange(2**31 + 5, device=DEVICE, dtype=torch.int32)
    assert torch.equal(copy(source, torch.zeros_like(source)), source)


def test_nothing_fails_where_ceilings_are_measured() -> None:
    found = ceilings(DEVICE)
    assert found.errors == {}
    assert found.matmul.keys() == found.copy.keys() == {"tilelang", "torch"}
