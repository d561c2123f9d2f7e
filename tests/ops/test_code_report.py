"""Counts of generated code, against the arithmetic of the tiles; and each pattern alone."""

from __future__ import annotations

import pytest

from tl_backend.configs.decode import default_decode_tile
from tl_backend.configs.prefill import default_prefill_config
from tl_backend.device import DeviceSpec
from tl_backend.ops.code_report import CodeReport, code_report, strided_tensors
from tl_backend.ops.codegen import generate
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.decode import decode_keys
from tl_backend.ops.prefill import prefill_key
from tl_backend.testing.cases import make_problem

HEAD_DIM = 128


def prefill(arch: str, page_size: int) -> tuple[KernelKey, CodeReport]:
    device = DeviceSpec.absent(arch)
    problem = make_problem(32, 8, HEAD_DIM, page_size, dtype="float32" if arch == "c" else "float16")
    key = prefill_key(problem, default_prefill_config(problem, device), device)
    return key, code_report(generate(key).source)


def matrix_instructions(key: KernelKey, m: int, n: int, k: int, groups: int) -> int:
    """Of one group for one tile: Q K^T and P V in instructions of m x n x k, ``groups`` sharing the rows.

    A gather of small pages has the loop's tiles and the last one in two places.
    """
    rows = key.config.block_m // (m * groups)
    return rows * (key.config.block_n // n * (HEAD_DIM // k) + HEAD_DIM // n * (key.config.block_n // k))


def test_hopper_with_whole_tiles() -> None:
    key, code = prefill("sm_90", 128)
    warpgroups = key.config.threads // 128
    # A warpgroup's instruction has the columns of the whole product.
    each = key.config.block_m // (64 * warpgroups) * (HEAD_DIM // 16 + key.config.block_n // 16)
    assert code.wgmma == 2 * each
    assert (code.mma, code.mfma, code.cp_async, code.tma_stores) == (0, 0, 0, 0)
    # A box of 64 elements: two for K and two for V. Full and empty barriers of each.
    assert code.tma_loads == 2 * HEAD_DIM // 64
    assert (code.mbarriers, code.mbarrier_waits) == (4, 4)
    assert code.threads == key.config.threads + 128
    assert len(code.warpgroup_registers) == 2
    assert code.narrow_offsets == ()


def test_hopper_with_small_pages() -> None:
    key, code = prefill("sm_90", 16)
    assert code.wgmma == 2 * (HEAD_DIM // 16 + key.config.block_n // 16)
    # Keys and values, 16 bytes a thread at a time, once before the loop and once in it.
    assert code.cp_async == 2 * 2 * key.config.block_n * HEAD_DIM * 2 // 16 // key.config.threads
    assert (code.tma_loads, code.mbarriers) == (0, 0)
    assert code.threads == key.config.threads


def test_ampere() -> None:
    key, code = prefill("sm_80", 16)
    # Four warps share the rows; the loop's tiles, and the last after it.
    assert code.mma == 2 * matrix_instructions(key, 16, 8, 16, key.config.threads // 32)
    assert (code.wgmma, code.mfma, code.tma_loads, code.mbarriers) == (0, 0, 0, 0)
    assert code.cp_async > 0


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
def test_amd(arch: str) -> None:
    key, code = prefill(arch, 16)
    assert code.mfma == matrix_instructions(key, 16, 16, 16, key.config.threads // 64)
    assert (code.wgmma, code.mma, code.tma_loads, code.cp_async) == (0, 0, 0, 0)
    assert code.syncthreads > 0
    assert code.threads == key.config.threads


def test_c() -> None:
    _, code = prefill("c", 16)
    assert (code.threads, code.mma, code.wgmma, code.mfma, code.syncthreads) == (None, 0, 0, 0, 0)
    assert code.narrow_offsets == ()


def test_strided_tensors_are_the_large_ones() -> None:
    device = DeviceSpec.absent("gfx942")
    problem = make_problem(32, 8, HEAD_DIM, 16, dtype="float16")
    key = decode_keys(problem, default_decode_tile(problem, device), device, split=False)[0]
    assert {"KV", "Q", "O"} <= set(strided_tensors(generate(key).source))


SOURCE = """extern "C" __global__ void f(half_t* __restrict__ A, const int* __restrict__ t, int64_t a_stride);
extern "C" __global__ void __launch_bounds__(256) f(half_t* __restrict__ A, const int* t, int64_t a_stride) {
  __shared__ __align__(16) uint64_t mbarrier_mem[6];
  tl::warpgroup_reg_dealloc<24>();
  for (int i = 0; i < n; ++i) {
    #pragma unroll
    for (int j = 1; j < 4; ++j) {
      for (int k = 0; k < 2; ++k) {
        BODY
      }
    }
  }
  tl::__sync_thread_partial(3, 128);
}
"""


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ("tl::tma_load(A_desc, mbarrier[0], (&(s[0])), 0, 0);", "tma_loads"),
        ("tl::tma_store(A_desc, (&(s[0])), 0, 0);", "tma_stores"),
        ("tl::cp_async_gs<16>(s, A);", "cp_async"),
        ("tl::cp_async_gs_conditional<16>(s, A, true);", "cp_async"),
        ("tl::wgmma_ss<tl::DataType::kFloat16, 64, 128, 16, false, false, 1, 1>(a, b, c, 1);", "wgmma"),
        ("tl::wgmma_rs<tl::DataType::kFloat16, 64, 128, 16, false, true, 1, 1>(a, b, c, 1);", "wgmma"),
        ("tl::mma_sync<tl::DataType::kFloat16, 16, 8, 16, false, true>(c, a, b);", "mma"),
        ("c = __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, 0, 0, 0);", "mfma"),
        ("mbarrier[(i & 1)].wait((i & 1));", "mbarrier_waits"),
        ("__syncthreads();", "syncthreads"),
    ],
)
def test_each_pattern_counts_as_often_as_constant_loops_repeat_it(call: str, field: str) -> None:
    empty, code = code_report(SOURCE.replace("BODY", "")), code_report(SOURCE.replace("BODY", call))
    assert (getattr(empty, field), getattr(code, field)) == (0, 6)
    assert (code.threads, code.mbarriers, code.named_barriers, code.warpgroup_registers) == (256, 6, 1, (24,))
    changed = {name for name in vars(code) if getattr(code, name) != getattr(empty, name)}
    assert changed == {field}


def test_what_only_looks_like_an_instruction_is_not_counted() -> None:
    calls = (
        "tl::initialize_wgmma_descriptor<1, 1, 64>(d, s); tl::prefetch_tma_descriptor(A_desc); tl::warpgroup_wait<0>();"
    )
    assert code_report(SOURCE.replace("BODY", calls)) == code_report(SOURCE.replace("BODY", ""))


@pytest.mark.parametrize(
    ("access", "narrow"),
    [
        ("A[((((int64_t)i) * a_stride) + k)] = 0;", ()),
        ("*(uint4*)(A + (((int64_t)i) * a_stride)) = x;", ()),
        ("A[(a_stride + i)] = 0;", ()),
        ("A[((((int64_t)i) * a_stride))] = 0; A[(i * 4)] = 0;", ("A",)),
        ("A[(i * ((int)n))] = 0;", ()),
    ],
    ids=["cast", "pointer", "by its stride", "one of two", "no stride"],
)
def test_narrow_offsets_of_strided_tensors_are_found(access: str, narrow: tuple[str, ...]) -> None:
    assert code_report(SOURCE.replace("BODY", access)).narrow_offsets == narrow
