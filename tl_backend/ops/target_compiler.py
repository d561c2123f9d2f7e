"""What the target's own compiler makes of generated code: registers, spills, and the instructions it issues.

Compiles for a device that need not be here, with the flags that TileLang gives. Nothing is launched.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tl_backend.device import DeviceSpec
from tl_backend.errors import EnvironmentProblemError, describe
from tl_backend.ops.compiled import COMPILE_FLAGS
from tl_backend.ops.environment import compiler_problem, find_compiler

TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Of one kernel.

    Attributes:
        compiler: its path.
        registers: of a thread; on AMD vector and accumulation registers together.
        spill_bytes: stores and loads of spilled registers, of a thread.
        stack_bytes: local memory of a thread.
        notes: what the compiler remarks, such as matrix instructions that it had to serialise.
        instructions: machine instructions of interest by name, each place once; empty where no disassembler is here.
        matmul_loops: of each innermost loop of WGMMA the places that access local memory: those between its first and
            last WGMMA, and all.
    """

    compiler: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    notes: tuple[str, ...] = ()
    instructions: dict[str, int] = field(default_factory=dict)
    matmul_loops: tuple[tuple[int, int], ...] = ()


def compile_for_target(source: str, device: DeviceSpec) -> Compiled:
    """Compile generated source for a GPU, present or absent.

    Raises:
        EnvironmentProblemError: no compiler for the device is here, or it failed.
    """
    compiler = find_compiler(device.vendor)
    if compiler is None:
        raise EnvironmentProblemError(compiler_problem(device))
    package = _tilelang_folder()
    suffix, object_name = (".cu", "kernel.cubin") if device.vendor == "nvidia" else (".cpp", "kernel.hsaco")
    with tempfile.TemporaryDirectory(prefix="tl-backend-inspect-") as folder:
        code, binary = Path(folder) / f"kernel{suffix}", Path(folder) / object_name
        code.write_text(source)
        arguments = _arguments(device, package)
        answer = _run([str(compiler), *arguments, "-o", str(binary), str(code)], device)
        if device.vendor == "amd":
            return parse_hipcc(answer, str(compiler))
        return parse_ptxas(answer, str(compiler), _disassemble(binary))


def parse_ptxas(text: str, compiler: str, assembly: str = "") -> Compiled:
    """What ``ptxas --verbose`` printed of one kernel, and its disassembly."""
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    registers = re.search(r"Used (\d+) registers", text)
    if spills is None or registers is None:
        raise _unreadable(compiler, text)
    return Compiled(
        compiler=compiler,
        registers=int(registers[1]),
        spill_bytes=int(spills[2]) + int(spills[3]),
        stack_bytes=int(spills[1]),
        notes=tuple(re.findall(r"(Potential Performance Loss: .*)", text)),
        instructions=count_sass(assembly),
        matmul_loops=local_accesses(assembly),
    )


# Matrix, bulk copy, asynchronous copy, barriers, and traffic to local memory.
_SASS = ("HGMMA", "HMMA", "UTMALDG", "UTMASTG", "LDGSTS", "BAR", "SYNCS", "F2F", "LDL", "STL")
_SASS_LINE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", re.MULTILINE)


def count_sass(assembly: str) -> dict[str, int]:
    """Instructions of interest in a disassembly."""
    found = Counter(_SASS_LINE.findall(assembly))
    return {name: found[name] for name in _SASS} if found else {}


_SASS_PLACE = re.compile(
    r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)[^;\n]*?(?:\b0x([0-9a-f]+)\s*)?;", re.MULTILINE
)


def local_accesses(assembly: str) -> tuple[tuple[int, int], ...]:
    """Of each innermost loop of WGMMA: places that access local memory, between the first and last WGMMA, and all."""
    code = [(int(place, 16), name, target) for place, name, target in _SASS_PLACE.findall(assembly)]
    places = {name: [place for place, found, _ in code if found == name] for name in ("HGMMA", "LDL", "STL", "EXIT")}
    local = places["LDL"] + places["STL"]

    def inside(kind: str, begin: int, end: int) -> list[int]:
        return [place for place in places[kind] if begin <= place <= end]

    # A branch backwards over an exit is no loop: it returns from code that lies out of line.
    loops = [
        (int(target, 16), place)
        for place, name, target in code
        if name == "BRA" and target and int(target, 16) < place
        and inside("HGMMA", int(target, 16), place) and not inside("EXIT", int(target, 16), place)
    ]  # fmt: skip
    found = []
    for begin, end in sorted(loops):
        if not any((begin, end) != other and begin <= other[0] and other[1] <= end for other in loops):
            matmuls = inside("HGMMA", begin, end)
            within = [place for place in local if begin <= place <= end]
            found.append((sum(matmuls[0] < place < matmuls[-1] for place in within), len(within)))
    return tuple(found)


def parse_hipcc(text: str, compiler: str) -> Compiled:
    """What clang's ``-Rpass-analysis=kernel-resource-usage`` printed of one kernel."""
    remarks = dict(re.findall(r"remark:\s+(?:\S+:\d+:\d+:\s+)?([^:\n]+): (\S+) \[-Rpass-analysis", text))
    try:
        registers = int(remarks["VGPRs"]) + int(remarks.get("AGPRs", 0))
        # A lane spills dwords.
        spills = 4 * (int(remarks["VGPRs Spill"]) + int(remarks["SGPRs Spill"]))
        scratch = int(remarks["ScratchSize [bytes/lane]"])
    except (KeyError, ValueError):
        raise _unreadable(compiler, text) from None
    return Compiled(compiler=compiler, registers=registers, spill_bytes=spills, stack_bytes=scratch)


def _arguments(device: DeviceSpec, package: Path) -> list[str]:
    flags, include = COMPILE_FLAGS[device.vendor], f"-I{package / 'src'}"
    if device.vendor == "amd":
        usage = "-Rpass-analysis=kernel-resource-usage"
        return [*flags, "-std=c++17", "-w", include, f"--offload-arch={device.arch}", "--genco", usage]
    assert isinstance(device.target, dict), "a GPU's target is a dict"
    cutlass = f"-I{package / '3rdparty' / 'cutlass' / 'include'}"
    arch = f"-arch={device.target['arch']}"
    return [*flags, "-std=c++20", "-w", "-cubin", arch, include, cutlass, "--ptxas-options=--verbose"]


def _run(command: list[str], device: DeviceSpec) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(command[0], device, str(error)) from error
    if answer.returncode:
        lines = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
        raise _failed(command[0], device, next((line for line in lines if "error" in line.lower()), str(lines[:1])))
    return answer.stdout + answer.stderr


def _failed(compiler: str, device: DeviceSpec, why: str) -> EnvironmentProblemError:
    return EnvironmentProblemError(
        describe(
            compiler,
            value=f"an error: {why[:300]}",
            limit=f"it must compile TileLang's code for {device.arch}",
            remedy="Install a version of it that knows this architecture.",
        )
    )


def _unreadable(compiler: str, text: str) -> EnvironmentProblemError:
    return EnvironmentProblemError(
        describe(
            compiler,
            value=f"{text.strip()[:200]!r}",
            limit="its report must name registers and spills",
            remedy="Read the source with --source instead.",
        )
    )


def _disassemble(binary: Path) -> str:
    """SASS, where cuobjdump is: in the CUDA toolkit, or in Triton's package."""
    tool = shutil.which("cuobjdump")
    spec = importlib.util.find_spec("triton")
    if tool is None and spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        tool = str(bundled) if bundled.is_file() else None
    if tool is None:
        return ""
    return subprocess.run([tool, "-sass", str(binary)], capture_output=True, text=True, check=False).stdout


def _tilelang_folder() -> Path:
    spec = importlib.util.find_spec("tilelang")
    if spec is None or spec.origin is None:
        raise EnvironmentProblemError(
            describe("TileLang", value="no such package", limit="its headers are needed", remedy="pip install tilelang")
        )
    return Path(spec.origin).parent
