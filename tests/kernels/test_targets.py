"""Code for every target, generated without its device: matrix instructions, shared memory, 64-bit offsets."""

from __future__ import annotations

import functools
import itertools

import pytest

from tl_backend.device import AMD_ARCHES, DeviceSpec
from tl_backend.ops.cache_write import cache_write_key, cache_write_problem
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.decode import decode_keys
from tl_backend.ops.prefill import prefill_key
from tl_backend.testing.cases import make_problem
from tl_backend.testing.codegen import GeneratedCode, generate, offsets

# Every kernel is generated once. The head sizes have a page size each: tiles within a page, and gathered from pages.
PAGES = {64: 128, 128: 16, 256: 48}
KERNELS = ("prefill", "decode", "split decode", "combine", "cache write")
ATTENTION = KERNELS[:3]


def key_of(kernel: str, arch: str, head_dim: int, page_size: int) -> KernelKey:
    device = DeviceSpec.absent(arch)
    dtype = "float32" if arch == "c" else "float16"
    problem = make_problem(32, 8, head_dim, page_size, dtype=dtype)
    if kernel == "prefill":
        return prefill_key(problem, device)
    if kernel == "cache write":
        return cache_write_key(cache_write_problem(problem), device)
    keys = decode_keys(problem, device, split=kernel != "decode")
    return keys[-1] if kernel == "combine" else keys[0]


@functools.cache
def code(kernel: str, arch: str, head_dim: int, page_size: int) -> GeneratedCode:
    return generate(key_of(kernel, arch, head_dim, page_size))


HIP = [
    (kernel, arch, head_dim, page_size)
    for arch, (head_dim, page_size), kernel in itertools.product(AMD_ARCHES, PAGES.items(), KERNELS)
    # It differs from the split decode in what it stores only.
    if kernel != "decode" or (arch, head_dim) == ("gfx942", 128)
]
CUDA = [
    *(("sm_90", kernel, page_size) for kernel, page_size in itertools.product(("prefill", "split decode"), (16, 128))),
    *(("sm_80", kernel, 16) for kernel in ("prefill", "split decode")),
]


@pytest.mark.parametrize(("kernel", "arch", "head_dim", "page_size"), HIP)
def test_hip_code_has_matrix_instructions_and_fits_the_lds(kernel, arch, head_dim, page_size) -> None:
    generated, limit = code(kernel, arch, head_dim, page_size), DeviceSpec.absent(arch).shared_memory_per_block
    assert ("__builtin_amdgcn_mfma" in generated.source) == (kernel in ATTENTION)
    assert generated.shared_memory <= limit, f"{generated.shared_memory} bytes of LDS; {arch} has {limit}"


@pytest.mark.parametrize(("kernel", "arch", "head_dim", "page_size"), [case for case in HIP if case[0] in ATTENTION])
def test_the_arithmetic_of_configs_is_what_hip_code_allocates(kernel, arch, head_dim, page_size) -> None:
    """TileLang adds LDS of its own, for reductions: a config that counts the tiles alone is 2 KiB short."""
    key = key_of(kernel, arch, head_dim, page_size)
    tile = key.config if kernel == "prefill" else key.config.tile
    assert code(kernel, arch, head_dim, page_size).shared_memory == tile.shared_memory(key.problem, key.device)


@pytest.mark.parametrize(("arch", "kernel", "page_size"), CUDA)
def test_cuda_code_has_the_instructions_of_its_architecture(arch: str, kernel: str, page_size: int) -> None:
    source = code(kernel, arch, 128, page_size).source
    hopper = arch == "sm_90"
    assert ("tl::wgmma_" in source) == hopper
    assert ("tl::mma_sync" in source) != hopper
    # Whole tiles by TMA; a gather of small pages by asynchronous copies of 16 bytes.
    assert ("tl::tma_load" in source) == (hopper and page_size == 128)
    assert ("tl::cp_async_gs<16>" in source) == (page_size == 16)


@pytest.mark.parametrize(("arch", "kernel", "page_size"), CUDA)
def test_cuda_code_fits_the_shared_memory(arch: str, kernel: str, page_size: int) -> None:
    key = key_of(kernel, arch, 128, page_size)
    tile = key.config if kernel == "prefill" else key.config.tile
    used = code(kernel, arch, 128, page_size).shared_memory
    assert used <= key.device.shared_memory_per_block
    assert used <= tile.shared_memory(key.problem, key.device)


STRIDES = {"KV": "kv_stride_b", "Q": "q_stride_t", "O": "o_stride_t", "K": "key_stride_t", "V": "value_stride_t"}
WIDE = [
    *((kernel, "gfx942", 128, 16) for kernel in KERNELS),
    ("prefill", "sm_90", 128, 16),
    ("split decode", "sm_90", 128, 16),
    ("prefill", "sm_90", 128, 128),
    ("prefill", "sm_80", 128, 16),
    ("prefill", "c", 64, 16),
    ("decode", "c", 64, 16),
    ("cache write", "c", 64, 16),
]


@pytest.mark.parametrize(("kernel", "arch", "head_dim", "page_size"), WIDE)
def test_offsets_into_global_tensors_are_of_64_bits(kernel, arch, head_dim, page_size) -> None:
    """CASES.md A1 ... A5: an offset of 32 bits wraps in pools and batches of more than 2**31 elements."""
    source = code(kernel, arch, head_dim, page_size).source
    checked = 0
    for tensor, stride in STRIDES.items():
        for offset in offsets(source, tensor):
            assert stride in offset, f"{tensor} is accessed without its stride: {offset}"
            assert "int64_t" in offset, f"{tensor} is accessed with a 32-bit offset: {offset}"
            assert f"(int){stride}" not in offset
            checked += 1
        assert f"int {stride}" not in source, f"{stride} is passed as 32 bits"
    assert checked > 0
