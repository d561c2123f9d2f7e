"""Code of the matmul and the copy for every target: matrix instructions, wide copies, shared memory."""

from __future__ import annotations

import functools
import itertools

import pytest

from tl_backend.configs.copy import copy_configs
from tl_backend.configs.gemm import GemmProblem, gemm_configs
from tl_backend.device import AMD_ARCHES, DeviceSpec
from tl_backend.ops.code_report import offsets
from tl_backend.ops.codegen import GeneratedCode, generate
from tl_backend.ops.copy import copy_key
from tl_backend.ops.gemm import gemm_key

ARCHES = ("sm_90", "sm_80", *AMD_ARCHES)
PROBLEM = GemmProblem(m=8192, n=8192, k=8192, dtype="bfloat16")
GEMMS = [(arch, index) for arch in ARCHES for index in range(len(gemm_configs(PROBLEM, DeviceSpec.absent(arch))))]


# On gfx950 two packed instructions become one, as the configs want.
pytestmark = pytest.mark.filterwarnings("ignore:On gfx950 with f16/bf16, remapping")


@functools.cache
def gemm_code(arch: str, index: int, size: int = PROBLEM.m) -> GeneratedCode:
    device = DeviceSpec.absent(arch)
    problem = GemmProblem(m=size, n=size, k=size, dtype=PROBLEM.dtype)
    return generate(gemm_key(problem, gemm_configs(problem, device)[index], device))


@functools.cache
def copy_code(arch: str) -> str:
    device = DeviceSpec.absent(arch)
    return generate(copy_key(copy_configs(device)[0], device)).source


@pytest.mark.parametrize(("arch", "index"), GEMMS)
def test_the_arithmetic_of_configs_is_what_code_allocates(arch: str, index: int) -> None:
    device = DeviceSpec.absent(arch)
    assert gemm_code(arch, index).shared_memory == gemm_configs(PROBLEM, device)[index].shared_memory(PROBLEM, device)


@pytest.mark.parametrize("index", range(len(gemm_configs(PROBLEM, DeviceSpec.absent("sm_90")))))
def test_hopper_multiplies_by_wgmma_and_moves_by_tma(index: int) -> None:
    source = gemm_code("sm_90", index).source
    assert "tl::wgmma_ss" in source
    assert "tl::tma_load(A_desc" in source
    assert "tl::tma_load(B_desc" in source
    assert "tl::tma_store(C_desc" in source
    assert "tl::warpgroup_reg_dealloc" in source, "nobody is the producer"


def test_hopper_uses_the_widest_wgmma() -> None:
    assert "64, 256, 16, false, false" in gemm_code("sm_90", 0).source


def test_ampere_multiplies_by_mma_and_moves_by_asynchronous_copies_of_16_bytes() -> None:
    source = gemm_code("sm_80", 0).source
    assert "tl::mma_sync" in source
    assert "tl::cp_async_gs<16>" in source


@pytest.mark.parametrize("arch", AMD_ARCHES)
def test_amd_multiplies_by_mfma_and_packs(arch: str) -> None:
    source = gemm_code(arch, 0).source
    if arch == "gfx950":
        assert "__builtin_amdgcn_mfma_f32_16x16x32" in source
    else:
        assert "__builtin_amdgcn_mfma_f32_16x16x16bf16_1k" in source
        assert "kp < 2" in source, "one matrix instruction a load"


@pytest.mark.parametrize("arch", ARCHES)
def test_blocks_run_in_panels(arch: str) -> None:
    assert "blockIdx = tl::rasterization2DRow<8>()" in gemm_code(arch, 0).source


@pytest.mark.parametrize("arch", ARCHES)
def test_sizes_that_tiles_do_not_divide_are_guarded(arch: str) -> None:
    source = gemm_code(arch, 0, size=1000).source
    assert "C_desc" not in source
    assert "tma_load" not in source
    # 125 vectors of 8 elements.
    assert "< 125)" in source or "< 1000)" in source


@pytest.mark.parametrize("arch", ARCHES)
def test_a_copy_is_of_16_bytes_a_thread_with_64_bit_offsets(arch: str) -> None:
    source = copy_code(arch)
    assert "*(int4*)(target" in source.replace("uint4", "int4")
    assert "*(int4*)(source" in source.replace("uint4", "int4")
    found = list(itertools.chain.from_iterable(offsets(source, tensor) for tensor in ("source", "target")))
    assert found
    assert all("int64_t" in offset and "piece" in offset for offset in found), found
