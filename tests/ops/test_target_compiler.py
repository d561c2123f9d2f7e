"""What compilers print is read; where one is here, its instructions are those that were counted in the source."""

from __future__ import annotations

import pytest

from tl_backend.configs.prefill import default_prefill_config
from tl_backend.device import DeviceSpec
from tl_backend.errors import EnvironmentProblemError
from tl_backend.ops import environment
from tl_backend.ops.code_report import code_report
from tl_backend.ops.codegen import generate
from tl_backend.ops.environment import find_compiler
from tl_backend.ops.prefill import prefill_key
from tl_backend.ops.target_compiler import compile_for_target, count_sass, local_accesses, parse_hipcc, parse_ptxas
from tl_backend.testing.cases import make_problem

PTXAS = """ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function 'f' for 'sm_90a'
ptxas info    : Function properties for f
    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 4 barriers, 16 bytes cumulative stack size, 1024 bytes smem
"""
HIPCC = "".join(
    f"k.cpp:9:0: remark: {line} [-Rpass-analysis=kernel-resource-usage]\n"
    for line in (
        "Function Name: f",
        "    TotalSGPRs: 40",
        "    VGPRs: 128",
        "    AGPRs: 64",
        "    ScratchSize [bytes/lane]: 32",
        "    Dynamic Stack: False",
        "    Occupancy [waves/SIMD]: 2",
        "    SGPRs Spill: 1",
        "    VGPRs Spill: 2",
        "    LDS Size [bytes/block]: 0",
    )
)
SASS = """	code for sm_90a
        /*0000*/                   LDC R1, c[0x0][0x28] ;    /* 0x00 */
        /*0010*/              @!P0 UTMALDG.4D [UR8], [UR4] ;  /* 0x00 */
        /*0020*/                   HGMMA.64x128x16.F32 R24, gdesc[UR12], R24 ;
        /*0030*/             @!UPT BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0040*/                   HGMMA.64x128x16.F32 R24, gdesc[UR12], R24 ;
"""


def test_ptxas() -> None:
    found = parse_ptxas(PTXAS, "nvcc", SASS)
    assert (found.registers, found.spill_bytes, found.stack_bytes) == (168, 36, 24)
    assert found.notes == ("Potential Performance Loss: wgmma.mma_async instructions are serialized",)
    assert {name: count for name, count in found.instructions.items() if count} == {"HGMMA": 2, "UTMALDG": 1, "BAR": 1}


def test_hipcc() -> None:
    found = parse_hipcc(HIPCC, "hipcc")
    assert (found.registers, found.spill_bytes, found.stack_bytes) == (192, 12, 32)


LOOPS = """
        /*0000*/                   STL [R1], R3 ;            /* 0x00 */
        /*0010*/                   LDL R2, [R1] ;            /* of the outer loop */
        /*0020*/                   HGMMA.64x128x16.F32 R24, gdesc[UR12], R24 ;
        /*0030*/                   LDL.LU R3, [R1+0x4] ;     /* between */
        /*0040*/                   HGMMA.64x128x16.F32 R24, gdesc[UR12], R24, gsb0 ;
        /*0050*/                   STL.64 [R1], R4 ;         /* after the last */
        /*0060*/              @!P0 BRA 0x20 ;
        /*0070*/                   HGMMA.64x128x16.F32 R24, gdesc[UR12], R24 ;
        /*0080*/               @P0 BRA.U.ANY 0x70 ;
        /*0090*/               @P1 BRA 0x10 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   BRA 0x80 ;
        /*00c0*/                   BRA 0xc0;
"""


def test_local_memory_is_counted_in_innermost_loops_of_matmuls() -> None:
    assert local_accesses(LOOPS) == ((1, 2), (0, 0))


def test_no_disassembler_claims_no_counts() -> None:
    assert count_sass("") == {}
    assert local_accesses("") == ()


@pytest.mark.parametrize("parse", [parse_ptxas, parse_hipcc])
def test_a_report_without_registers_is_an_error(parse) -> None:
    with pytest.raises(EnvironmentProblemError, match="must name registers and spills"):
        parse("nothing of use", "cc")


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("ROCM_PATH", raising=False)
    monkeypatch.setattr(environment, "_DEFAULT_HOMES", {})
    with pytest.raises(EnvironmentProblemError, match="got no hipcc"):
        compile_for_target("", DeviceSpec.absent("gfx942"))


@pytest.mark.skipif(find_compiler("nvidia") is None, reason="no nvcc here")
def test_instructions_are_those_of_the_source() -> None:
    device = DeviceSpec.absent("sm_90")
    problem = make_problem(32, 8, 128, 128, dtype="float16")
    source = generate(prefill_key(problem, default_prefill_config(problem, device), device)).source
    code, found = code_report(source), compile_for_target(source, device)
    assert found.registers >= 32
    if found.instructions:  # Else no disassembler is here.
        assert found.instructions["HGMMA"] == code.wgmma
        assert found.instructions["UTMALDG"] == code.tma_loads
        assert found.instructions["BAR"] == code.syncthreads + code.named_barriers


@pytest.mark.skipif(find_compiler("nvidia") is None, reason="no nvcc here")
def test_a_source_that_does_not_compile_is_one_error() -> None:
    with pytest.raises(EnvironmentProblemError, match=r"an error: .*error"):
        compile_for_target("this is not CUDA", DeviceSpec.absent("sm_90"))
