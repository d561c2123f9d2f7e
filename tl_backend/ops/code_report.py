"""What generated CUDA, HIP or C does, read from its text: instructions, barriers, and the width of offsets.

The patterns are those of TileLang 0.1.12 and 0.1.15. A call inside loops of constant extent counts as often as they
repeat it: one version unrolls what another leaves to the compiler, and both count alike. Loops whose extent is known at
run time count as one pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CodeReport:
    """Counts are of one thread's way through the source, each loop of run-time extent passed once.

    Attributes:
        threads: of a block; None for C.
        tma_loads, tma_stores: bulk tensor copies.
        cp_async: asynchronous copies to shared memory.
        wgmma, mma, mfma: matrix instructions of a warpgroup, a warp and a wave.
        mbarriers: barriers in shared memory; mbarrier_waits: waits for them.
        syncthreads: barriers of the whole block.
        named_barriers: ``bar.sync`` of some of its threads, those inside reductions left out.
        warpgroup_registers: what warpgroups set their registers to (setmaxnreg), producer and consumers.
        narrow_offsets: tensors with strides that are accessed somewhere without 64-bit arithmetic.
    """

    threads: int | None
    tma_loads: int
    tma_stores: int
    cp_async: int
    wgmma: int
    mma: int
    mfma: int
    mbarriers: int
    mbarrier_waits: int
    syncthreads: int
    named_barriers: int
    warpgroup_registers: tuple[int, ...]
    narrow_offsets: tuple[str, ...]


_CALLS = {
    "tma_loads": re.compile(r"\btl::tma_load\w*(?:<[^(]*>)?\("),
    "tma_stores": re.compile(r"\btl::tma_store\w*(?:<[^(]*>)?\("),
    "cp_async": re.compile(r"\btl::cp_async_gs\w*<"),
    "wgmma": re.compile(r"\btl::wgmma_[rs]s<"),
    "mma": re.compile(r"\btl::mma_sync<"),
    "mfma": re.compile(r"\b__builtin_amdgcn_mfma_\w+\("),
    "mbarrier_waits": re.compile(r"\bmbarrier\w*\[[^]]*\]\.wait\("),
    "syncthreads": re.compile(r"\b__syncthreads\("),
    "named_barriers": re.compile(r"\btl::__sync_thread_partial\("),
}
_MBARRIERS = re.compile(r"__shared__ (?:__align__\(\d+\) )?uint64_t \w*mbarrier\w*\[(\d+)\]")
_LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\((\d+)")
_SET_REGISTERS = re.compile(r"\btl::warpgroup_reg_(?:de)?alloc<(\d+)>")
_CONSTANT_LOOP = re.compile(r"for \(int (\w+) = (\d+); \1 < (\d+); \+\+\1\) ?$")
_POINTER = re.compile(r"\b(?:const )?[\w:]+\* (?:__restrict__ )?(\w+)(?=[,)])")
_SIGNATURE = re.compile(r"^[^\n;{]*\([^\n;{]*\) ?\{$", re.MULTILINE)


def code_report(source: str) -> CodeReport:
    """Read generated source."""
    counts = dict.fromkeys(_CALLS, 0)
    for text, repeats in _weighted(source):
        for name, pattern in _CALLS.items():
            counts[name] += repeats * len(pattern.findall(text))
    bounds = _LAUNCH_BOUNDS.search(source)
    return CodeReport(
        threads=int(bounds[1]) if bounds else None,
        mbarriers=sum(int(count) for count in _MBARRIERS.findall(source)),
        warpgroup_registers=tuple(int(count) for count in _SET_REGISTERS.findall(source)),
        narrow_offsets=tuple(tensor for tensor in strided_tensors(source) if _is_narrow(source, tensor)),
        **counts,
    )


def strided_tensors(source: str) -> list[str]:
    """The pointer arguments whose tensors are accessed with a stride: large ones, whose offsets must have 64 bits."""
    names = sorted({name for line in _SIGNATURE.findall(source) for name in _POINTER.findall(line)})
    return [name for name in names if any("_stride" in offset for offset in offsets(source, name))]


def offsets(source: str, tensor: str) -> list[str]:
    """The index expressions with which a source accesses a global tensor."""
    found = []
    for match in re.finditer(rf"\b{tensor}(?: \+ \(|\[)", source):
        opening, closing = ("(", ")") if match[0].endswith("(") else ("[", "]")
        depth, end = 1, match.end()
        while depth:
            depth += {opening: 1, closing: -1}.get(source[end], 0)
            end += 1
        found.append(source[match.end() : end - 1])
    return found


def _is_narrow(source: str, tensor: str) -> bool:
    """C declares the strides as int64_t, and an offset may show it by them alone."""
    wide = {"int64_t", *re.findall(r"\bint64_t (\w+)", source)}
    return any(not wide & set(re.findall(r"\w+", offset)) for offset in offsets(source, tensor))


def _weighted(source: str) -> Iterator[tuple[str, int]]:
    """The text between braces, with the number of times that constant loops repeat it."""
    repeats = [1]
    for text, brace in re.findall(r"([^{}]*)([{}]?)", source):
        yield text, repeats[-1]
        if brace == "{":
            loop = _CONSTANT_LOOP.search(text)
            repeats.append(repeats[-1] * (int(loop[3]) - int(loop[2]) if loop else 1))
        elif brace == "}" and len(repeats) > 1:
            repeats.pop()
