"""Code for every target, generated without its device: matrix instructions, shared memory, 64-bit offsets."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest

from tl_backend.configs.decode import default_decode_tile
from tl_backend.configs.prefill import default_prefill_config
from tl_backend.configs.space import space
from tl_backend.configs.tile import TileConfig
from tl_backend.device import AMD_ARCHES, DeviceSpec
from tl_backend.ops.cache_write import cache_write_key, cache_write_problem
from tl_backend.ops.code_report import offsets
from tl_backend.ops.codegen import GeneratedCode, generate
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.decode import decode_keys
from tl_backend.ops.prefill import prefill_key
from tl_backend.testing.cases import make_problem

# Every kernel is generated once. The head sizes have a page size each: tiles within a page, and gathered from pages.
PAGES = {64: 128, 128: 16, 256: 48}
CONTIGUOUS = None
KERNELS = ("prefill", "decode", "split decode", "combine", "cache write")
ATTENTION = KERNELS[:3]


def key_of(kernel: str, arch: str, head_dim: int, page_size: int | None) -> KernelKey:
    device = DeviceSpec.absent(arch)
    dtype = "float32" if arch == "c" else "float16"
    problem = make_problem(32, 8, head_dim, page_size, dtype=dtype)
    if kernel == "prefill":
        return prefill_key(problem, default_prefill_config(problem, device), device)
    if kernel == "cache write":
        return cache_write_key(cache_write_problem(problem), device)
    keys = decode_keys(problem, default_decode_tile(problem, device), device, split=kernel != "decode")
    return keys[-1] if kernel == "combine" else keys[0]


@functools.cache
def code(kernel: str, arch: str, head_dim: int, page_size: int | None) -> GeneratedCode:
    return generate(key_of(kernel, arch, head_dim, page_size))


HIP = [
    ("prefill", "gfx942", 128, CONTIGUOUS),
    ("prefill", "gfx942", 512, 64),
    ("split decode", "gfx950", 512, 16),
    *(
        (kernel, arch, head_dim, page_size)
        for arch, (head_dim, page_size), kernel in itertools.product(AMD_ARCHES, PAGES.items(), KERNELS)
        # It differs from the split decode in what it stores only.
        if kernel != "decode" or (arch, head_dim) == ("gfx942", 128)
    ),
]
TWO = ("prefill", "split decode")
CUDA = [
    *(("sm_90", kernel, 128, page_size) for kernel, page_size in itertools.product(TWO, (16, 128))),
    *(("sm_80", kernel, 128, 16) for kernel in TWO),
    *((arch, "prefill", 128, CONTIGUOUS) for arch in ("sm_90", "sm_80")),
    # Tiles whose columns the warps split.
    ("sm_90", "split decode", 512, 16),
    ("sm_80", "prefill", 512, 16),
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


@pytest.mark.parametrize(("arch", "kernel", "head_dim", "page_size"), CUDA)
def test_cuda_code_has_the_instructions_of_its_architecture(arch, kernel, head_dim, page_size) -> None:
    source = code(kernel, arch, head_dim, page_size).source
    hopper = arch == "sm_90"
    assert ("tl::wgmma_" in source) == hopper
    assert ("tl::mma_sync" in source) != hopper
    # Whole tiles by TMA; a gather of small pages by asynchronous copies of 16 bytes.
    whole = page_size in (128, CONTIGUOUS)
    assert ("tl::tma_load" in source) == (hopper and whole)
    assert ("tl::cp_async_gs<16>" in source) == (page_size == 16 or (whole and not hopper))


@pytest.mark.parametrize(("arch", "kernel", "head_dim", "page_size"), CUDA)
def test_cuda_code_fits_the_shared_memory(arch, kernel, head_dim, page_size) -> None:
    key = key_of(kernel, arch, head_dim, page_size)
    tile = key.config if kernel == "prefill" else key.config.tile
    used = code(kernel, arch, head_dim, page_size).shared_memory
    assert used <= key.device.shared_memory_per_block
    assert used <= tile.shared_memory(key.problem, key.device)


LLAMA = make_problem(32, 8, 128, 16, dtype="bfloat16")
TILE = TileConfig(block_m=64, block_n=32, heads_per_tile=4, num_stages=0, threads=256)


@functools.cache
def tile_code(tile: TileConfig, arch: str, page_size: int | None = 16, **features: Any) -> GeneratedCode:
    problem = replace(LLAMA, page_size=page_size, **features)
    return generate(prefill_key(problem, tile, DeviceSpec.absent(arch)))


@pytest.mark.parametrize("option", [{"k_pack": 2}, {"coalesced_width": 4}, {"rasterisation": 3}, {"num_split_q": 38}])
def test_each_option_of_a_tile_changes_hip_code(option) -> None:
    tile = replace(TILE, **option)
    assert tile.illegal_reason(LLAMA, DeviceSpec.absent("gfx942")) is None
    changed, plain = tile_code(tile, "gfx942"), tile_code(TILE, "gfx942")
    assert changed.source != plain.source
    assert "__builtin_amdgcn_mfma" in changed.source
    assert changed.shared_memory == tile.shared_memory(LLAMA, DeviceSpec.absent("gfx942"))


def test_packed_matrix_instructions_read_twice_as_much_at_once() -> None:
    """A lane holds 4 elements of an MFMA's operand, 8 bytes; two instructions' are one load of 16 bytes."""
    packed, plain = tile_code(replace(TILE, k_pack=2), "gfx942").source, tile_code(TILE, "gfx942").source
    assert "*(uint4*)(A_local" in packed
    assert "*(uint2*)(A_local" in plain
    assert "*(uint4*)(A_local" not in plain


def test_narrow_accesses_gather_half_as_much_at_once() -> None:
    narrow = replace(TILE, threads=128, num_stages=1, coalesced_width=4)
    source = tile_code(narrow, "sm_90").source
    assert "tl::cp_async_gs<8>" in source
    assert "tl::cp_async_gs<16>" not in source


# Of each space, one that the defaults and the options above leave out.
SAMPLE = [
    ("gfx90a", 16, TileConfig(block_m=128, block_n=16, heads_per_tile=4, num_stages=0, threads=512, k_pack=2)),
    ("gfx942", 128, replace(TILE, num_split_q=38, coalesced_width=4)),
    ("gfx950", 128, TileConfig(block_m=128, block_n=128, heads_per_tile=4, num_stages=1, threads=256)),
    ("gfx950", 16, replace(TILE, num_stages=1, num_split_q=32)),
    ("sm_90", 128, TileConfig(block_m=256, block_n=64, heads_per_tile=2, num_stages=2, threads=512)),
    ("sm_90", 16, TileConfig(block_m=64, block_n=16, heads_per_tile=1, num_stages=3, threads=128)),
    ("sm_90", 16, TileConfig(block_m=128, block_n=64, heads_per_tile=4, num_stages=1, threads=256)),
]


@pytest.mark.parametrize(("arch", "page_size", "tile"), SAMPLE)
def test_the_arithmetic_of_what_a_space_keeps_is_what_code_allocates(arch, page_size, tile) -> None:
    # On sm_90 the portable family has what Hopper's refuses.
    features = {"has_alibi": arch == "sm_90"}
    problem, device = replace(LLAMA, page_size=page_size, **features), DeviceSpec.absent(arch)
    assert tile in space("prefill", problem, device).kept
    generated = tile_code(tile, arch, page_size, **features)
    assert generated.shared_memory == tile.shared_memory(problem, device)
    assert ("tl::wgmma_" if arch == "sm_90" else "__builtin_amdgcn_mfma") in generated.source


STRIDES = {
    "KV": ("kv_stride_b",),
    "Q": ("q_stride_t",),
    "O": ("o_stride_t",),
    # Of attention and of the cache write. In the prefill both names may be the cache's, whose strides are K's.
    "K": ("k_stride_b", "key_stride_t"),
    "V": ("k_stride_b", "v_stride_s", "value_stride_t"),
}
WIDE = [
    *((kernel, "gfx942", 128, 16) for kernel in KERNELS),
    ("prefill", "sm_90", 128, 16),
    ("split decode", "sm_90", 128, 16),
    ("prefill", "sm_90", 128, 128),
    ("prefill", "sm_80", 128, 16),
    ("prefill", "sm_80", 128, CONTIGUOUS),
    ("prefill", "gfx942", 128, CONTIGUOUS),
    ("prefill", "c", 64, 16),
    ("prefill", "c", 64, CONTIGUOUS),
    ("decode", "c", 64, 16),
    ("cache write", "c", 64, 16),
]


@pytest.mark.parametrize(("kernel", "arch", "head_dim", "page_size"), WIDE)
def test_offsets_into_global_tensors_are_of_64_bits(kernel, arch, head_dim, page_size) -> None:
    """CASES.md A1 ... A5: an offset of 32 bits wraps in pools and batches of more than 2**31 elements."""
    source = code(kernel, arch, head_dim, page_size).source
    checked = 0
    for tensor, strides in STRIDES.items():
        for offset in offsets(source, tensor):
            assert any(stride in offset for stride in strides), f"{tensor} is accessed without its stride: {offset}"
            assert "int64_t" in offset, f"{tensor} is accessed with a 32-bit offset: {offset}"
            assert not any(f"(int){stride}" in offset for stride in strides)
            checked += 1
        assert not any(f"int {stride}" in source for stride in strides), f"a stride of {tensor} is passed as 32 bits"
    assert checked > 0
