"""Hopper's prefill as code for sm_90a, on any machine: what TileLang generates, and what nvcc makes of it where it is.

What a warp-specialised kernel loses its speed by without a wrong answer: a copy that is no TMA, a matmul that is no
WGMMA, weights that go through shared memory, a barrier of the whole block, registers that spill.
"""

from __future__ import annotations

import functools
import re

import pytest

from tl_backend.configs.choice import FixedChooser
from tl_backend.configs.prefill_hopper import (
    CONVERTER_REGISTERS,
    HEAD_DIMS,
    NARROW_DTYPES,
    REGISTERS,
    HopperPrefillConfig,
    default_hopper_config,
)
from tl_backend.device import DeviceSpec
from tl_backend.ops.code_report import CodeReport, code_report
from tl_backend.ops.codegen import GeneratedCode, generate
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.environment import find_compiler
from tl_backend.ops.prepare import required_kernels
from tl_backend.ops.target_compiler import Compiled, compile_for_target
from tl_backend.problem import AttentionProblem
from tl_backend.testing.cases import make_problem
from tl_backend.testing.problems import name

HOPPER = DeviceSpec.absent("sm_90")
REGISTER_FILE, REGISTER_STEP = 65536, 8  # Of a multiprocessor; what a thread's registers are rounded to.
WGMMA_K = 16  # Elements along k of one instruction.

PROBLEMS = (
    make_problem(64, 8, 64, 16, dtype="bfloat16"),
    make_problem(64, 8, 64, 128, dtype="bfloat16", window=128, sinks_dtype="bfloat16"),
    make_problem(32, 8, 96, 128, dtype="bfloat16"),
    make_problem(32, 8, 128, 16, dtype="bfloat16"),
    make_problem(32, 8, 128, 128, dtype="float16"),
    make_problem(28, 4, 128, 784, dtype="bfloat16", causal=False, returns_lse=True),
    make_problem(32, 8, 128, 64, dtype="bfloat16", window=1000, soft_cap=30.0, sinks_dtype="float32", returns_lse=True),
    make_problem(8, 1, 160, 48, dtype="float16"),
    make_problem(16, 2, 192, 64, dtype="bfloat16"),
    make_problem(8, 2, 224, 16, dtype="bfloat16"),
    make_problem(16, 8, 256, 16, dtype="bfloat16", soft_cap=50.0),
    make_problem(16, 8, 256, 128, dtype="float16", returns_lse=True),
    make_problem(64, 8, 64, 16, dtype="bfloat16", kv_dtype="float8_e5m2", causal=False),
    make_problem(32, 8, 96, 128, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
    make_problem(32, 8, 128, 128, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
    make_problem(
        28, 4, 128, 16, dtype="bfloat16", kv_dtype="float8_e4m3fn", window=1000, soft_cap=30.0, sinks_dtype="float32",
        returns_lse=True,
    ),
    make_problem(8, 1, 160, 48, dtype="float16", kv_dtype="float8_e4m3fn"),
    make_problem(16, 2, 192, 64, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
    make_problem(8, 2, 224, 16, dtype="bfloat16", kv_dtype="float8_e5m2"),
    make_problem(16, 8, 256, 128, dtype="float16", kv_dtype="float8_e4m3fn", window=500, returns_lse=True),
)  # fmt: skip
# Bytes that a kernel may spill. nvcc 13.0 leaves 0 to 340, nearly all of them in the producer, whose threads have 32 or
# 40 registers.
MAX_SPILL_BYTES = 400
CONFIGS = [(problem, default_hopper_config(problem, HOPPER)) for problem in PROBLEMS]
each_config = pytest.mark.parametrize(("problem", "config"), CONFIGS, ids=[name(problem) for problem in PROBLEMS])
needs_nvcc = pytest.mark.skipif(find_compiler("nvidia") is None, reason="needs nvcc")


@functools.cache
def generated(problem: AttentionProblem, config: HopperPrefillConfig) -> GeneratedCode:
    return generate(KernelKey("prefill_hopper", problem, config, HOPPER))


@functools.cache
def assembled(problem: AttentionProblem, config: HopperPrefillConfig) -> Compiled:
    return compile_for_target(generated(problem, config).source, HOPPER)


def report(problem: AttentionProblem, config: HopperPrefillConfig) -> CodeReport:
    return code_report(generated(problem, config).source)


def barriers(source: str) -> int:
    """Barriers in shared memory."""
    return sum(int(count) for count in re.findall(r"__shared__ (?:__align__\(\d+\) )?uint64_t \w+\[(\d+)\]", source))


def calls(source: str, pattern: str) -> list[int]:
    """Where each call begins."""
    return [match.start() for match in re.finditer(pattern, source)]


def inside_loops(source: str, place: int) -> bool:
    """Whether a place is in the braces of a ``for`` or a ``while``."""
    for loop in re.finditer(r"\b(?:for|while) \(", source[:place]):
        head = _closing(source, loop.end(), "()")
        opened = re.compile(r"\s*\{").match(source, head)
        if opened and opened.end() <= place < _closing(source, opened.end(), "{}"):
            return True
    return False


def _closing(source: str, begin: int, pair: str) -> int:
    """Past the bracket that closes one opened before ``begin``."""
    depth, place = 1, begin
    while depth:
        depth += {pair[0]: 1, pair[1]: -1}.get(source[place], 0)
        place += 1
    return place


def test_every_head_size_is_here() -> None:
    assert {problem.head_dim for problem in PROBLEMS} == set(HEAD_DIMS)
    assert {config.warpgroups for _, config in CONFIGS} == set(REGISTERS)
    quantized = [(problem, config) for problem, config in CONFIGS if problem.is_quantized]
    assert {problem.head_dim for problem, _ in quantized} == set(HEAD_DIMS)
    assert {problem.kv_dtype for problem, _ in quantized} == set(NARROW_DTYPES)
    assert {config.converter_warps for _, config in quantized} == set(CONVERTER_REGISTERS)


@each_config
def test_copies_are_tma_and_matmuls_are_of_warpgroups(problem, config) -> None:
    code, source = report(problem, config), generated(problem, config).source
    assert code.tma_loads >= 3, "Q, K and V"
    assert (code.cp_async, code.mma) == (0, 0)
    # Scores of whole heads, from shared memory; outputs of whole tiles, the weights from registers. Queries that are in
    # registers make the loops' scores count with the outputs.
    scores = code_report(source.replace("tl::wgmma_rs<", "")).wgmma
    outputs = code_report(source.replace("tl::wgmma_ss<", "")).wgmma
    assert scores > 0
    assert outputs > 0
    assert scores % (problem.head_dim // WGMMA_K) == 0
    loops = 1 if problem.window is not None else 2
    outputs -= loops * (problem.head_dim // WGMMA_K) if config.q_in_registers else 0
    assert outputs > 0
    assert outputs % (config.block_n // WGMMA_K) == 0


@each_config
def test_a_warpgroup_loads_and_the_others_compute(problem, config) -> None:
    code = report(problem, config)
    assert "prefill_hopper_kernel_kernel(" in generated(problem, config).source, "tests.gpu.sanitize filters by name"
    assert code.threads == config.threads
    consumer, producer = config.role_registers
    assert sorted(code.warpgroup_registers) == [producer, consumer]


@each_config
def test_tiles_are_handed_over_by_barriers_of_their_own(problem, config) -> None:
    source = generated(problem, config).source
    assert barriers(source) == config.barriers
    assert len(calls(source, r"\w+\[[^]]*\]\.wait\(")) >= 6
    assert "tl::fence_proxy_async" in source


@each_config
def test_the_whole_block_meets_before_the_warpgroups_part_and_never_again(problem, config) -> None:
    source = generated(problem, config).source
    parting = min(calls(source, r"tl::warpgroup_reg_(?:de)?alloc<"))
    meetings = calls(source, r"\b__syncthreads\(")
    assert meetings, "barriers are initialised by one thread"
    assert [place for place in meetings if place > parting] == []
    assert [place for place in meetings if inside_loops(source, place)] == []


@each_config
def test_the_arithmetic_of_the_config_is_what_code_allocates(problem, config) -> None:
    used, said = generated(problem, config).shared_memory, config.shared_memory(problem, HOPPER)
    assert used == said, f"{used} bytes; the config says {said}"
    assert used <= HOPPER.shared_memory_per_block


@each_config
def test_offsets_into_global_tensors_are_of_64_bits(problem, config) -> None:
    """CASES.md A1 ... A5."""
    assert report(problem, config).narrow_offsets == ()


@each_config
def test_an_8_bit_cache_lands_as_it_is_and_becomes_keys_of_the_queries_type_and_values_of_float16(
    problem, config
) -> None:
    source = generated(problem, config).source
    tile = config.block_n * problem.head_dim
    loaded = {
        int(count) for count in re.findall(r"[kv]_(?:ready|landed)\[[^]]*\]\.arrive_and_expect_tx\((\d+)\)", source)
    }
    assert loaded == {tile if problem.is_quantized else 2 * tile}
    is_e5m2 = str(problem.kv_dtype == "float8_e5m2").lower()
    kinds = {(is_e5m2, str(problem.dtype == "bfloat16").lower()), (is_e5m2, "false")}
    assert set(re.findall(r"\bwiden<(\w+), (\w+)>\(", source)) == (kinds if problem.is_quantized else set())


@needs_nvcc
@each_config
def test_no_conversion_takes_the_unit_of_the_exponentials(problem, config) -> None:
    """That of single elements does, at 16 a cycle and multiprocessor."""
    found = assembled(problem, config).instructions
    if not found:
        pytest.skip("needs cuobjdump")
    assert found["F2F"] == 0


@needs_nvcc
@each_config
def test_loops_of_matmuls_leave_local_memory_alone_and_few_registers_spill(problem, config) -> None:
    code = assembled(problem, config)
    assert code.spill_bytes <= MAX_SPILL_BYTES
    # All that lies in local memory are spills, of 4 bytes or more: no array.
    assert 4 * sum(code.instructions.get(name, 0) for name in ("LDL", "STL")) <= code.spill_bytes
    if code.instructions:
        # A window leaves the loop with a mask alone. At head size 256 that one, at the diagonal, reloads up to 3 times.
        *clear, masked = code.matmul_loops
        assert clear == ([] if problem.window is not None else [(0, 0)])
        assert masked[1] <= (3 if problem.head_dim == 256 else 0)
    # All that the register file has for a block: what the warpgroups share out.
    assert code.registers == REGISTER_FILE // config.threads // REGISTER_STEP * REGISTER_STEP
    assert code.notes == (), "ptxas serialised a WGMMA"


@needs_nvcc
@each_config
def test_machine_code_has_the_instructions_that_the_source_asks_for(problem, config) -> None:
    found, code = assembled(problem, config).instructions, report(problem, config)
    if not found:
        pytest.skip("needs cuobjdump")
    # Of a KV tile; the compiler may merge loops that differ in nothing.
    of_tile = problem.head_dim // WGMMA_K + config.block_n // WGMMA_K
    assert 0 < found["HGMMA"] <= code.wgmma
    assert found["HGMMA"] % of_tile == 0
    assert found["HMMA"] == 0
    assert found["UTMALDG"] >= code.tma_loads
    assert (found["UTMASTG"] > 0) == (code.tma_stores > 0)
    assert found["LDGSTS"] == 0
    assert found["SYNCS"] > 0


def test_a_combine_joins_the_pieces() -> None:
    problem, config = CONFIGS[0]
    keys = required_kernels(problem, HOPPER, chooser=FixedChooser(problem, HOPPER, prefill=config))
    (combine,) = [key for key in keys if key.kind == "prefill_combine"]
    code = code_report(generate(combine).source)
    assert (code.wgmma, code.mma, code.tma_loads) == (0, 0, 0)
    assert code.narrow_offsets == ()


LOOPS = """extern "C" __global__ void f(int n) {
  __syncthreads();
  while (1) {
    if (!((0 < n))) { break; }
    n = n - 1;
    A
  }
  for (int k = 0; k < n; ++k) {
    if (k < 3) {
      B
    }
  }
  for (int k = 0; k < n; ++k) { n = 1; }
  C
}
"""


@pytest.mark.parametrize(("place", "inside"), [("A", True), ("B", True), ("C", False), ("__syncthreads", False)])
def test_loops_are_recognised(place: str, inside: bool) -> None:
    assert inside_loops(LOOPS, LOOPS.index(f"  {place}")) == inside
