"""``tl-backend inspect``: the code of a kernel for any target, present or absent, and what it does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tl_backend.cli.inspect_key import KINDS, kernel_key
from tl_backend.cli.options import ArchOption, MultiprocessorsOption, device_of, format_problem, parse_problem
from tl_backend.cli.output import JsonOption, people, print_json, progress
from tl_backend.configs.occupancy import Occupancy, occupancy
from tl_backend.errors import EnvironmentProblemError, InvalidInputError, UnsupportedError, describe

if TYPE_CHECKING:
    from tl_backend.ops.code_report import CodeReport
    from tl_backend.ops.compiled import KernelKey
    from tl_backend.ops.target_compiler import Compiled


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What is known of one kernel.

    Attributes:
        source: the generated code.
        code: what its text says.
        shared_memory: bytes that a block allocates; expected_shared_memory: by the config's arithmetic, None where the
            kernel's config has none.
        compiled: what the target's compiler says; None where it was not asked, or where ``no_compiler`` says why.
        occupancy: resident blocks, by registers too where they are known; None on a CPU.
    """

    key: KernelKey
    source: str
    code: CodeReport
    shared_memory: int
    expected_shared_memory: int | None
    compiled: Compiled | None
    no_compiler: str | None
    occupancy: Occupancy | None

    @property
    def faults(self) -> list[str]:
        """Why the kernel would not run, or would run wrongly with large tensors."""
        limit, found = self.key.device.shared_memory_per_block, []
        if self.key.device.is_gpu and self.shared_memory > limit:
            found.append(f"{self.shared_memory} bytes of shared memory; {self.key.device.arch} has {limit}")
        found += [f"{tensor} is accessed with 32-bit offsets" for tensor in self.code.narrow_offsets]
        return found


def inspect(
    kernel: Annotated[str, typer.Option(metavar="KERNEL", help=f"One of {', '.join(KINDS)}.")],
    problem: Annotated[str | None, typer.Option(metavar="SPEC", help="Default: 32/8,D128,page16,bfloat16.")] = None,
    arch: ArchOption = None,
    multiprocessors: MultiprocessorsOption = None,
    config: Annotated[
        str | None, typer.Option(metavar="JSON", help="Fields that replace those of the default config.")
    ] = None,
    source: Annotated[str | None, typer.Option(metavar="FILE", help="Write the code there; - for stdout.")] = None,
    compiles: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Ask the target's compiler, if here.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Show the code of a kernel for any target. No GPU is needed.

    Counts instructions, barriers, shared memory and occupancy; registers, spills and stack where a compiler for the
    target is here. Exits with 1 if the kernel does not fit the target or has 32-bit offsets.

    \b
    Example:
      tl-backend inspect --kernel prefill_hopper --arch sm_90 --problem 32/8,D128,page128,bfloat16
    """  # noqa: D301 click wants the character.
    if source == "-" and as_json:
        raise InvalidInputError(
            describe("--source", value="- with --json", limit="stdout takes one of them", remedy="Name a file.")
        )
    device = device_of(arch, multiprocessors)
    default = f"32/8,D128,page16,{device.dtypes[-1]}"
    key = kernel_key(kernel, parse_problem(problem or default), device, config)
    found = inspect_kernel(key, compiles=compiles)
    if source == "-":
        typer.echo(found.source)
    elif source is not None:
        _write(Path(source), found.source)
    if as_json:
        print_json(document(found))
    else:
        console = progress() if source == "-" else people()
        console.print(_table(found))
        for fault in found.faults:
            console.print(f"[bold red]problem[/] {escape(fault)}")
    if found.faults:
        raise typer.Exit(1)


def inspect_kernel(key: KernelKey, *, compiles: bool = True) -> Inspection:
    """Generate and read the code of a kernel; compile it, if a compiler is here.

    Raises:
        UnsupportedError: TileLang generates no code of its config.
    """
    from tl_backend.ops.code_report import code_report
    from tl_backend.ops.codegen import generate
    from tl_backend.ops.target_compiler import compile_for_target

    try:
        generated = generate(key)
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        raise UnsupportedError(
            describe(
                f"config {key.config}",
                value=f"{type(error).__name__}: {lines[-1]}",
                limit=f"TileLang must generate its code for {key.device.arch}",
                remedy="Choose another config.",
            )
        ) from error
    code = code_report(generated.source)
    compiled, reason = None, None
    if compiles and key.device.is_gpu:
        try:
            compiled = compile_for_target(generated.source, key.device)
        except EnvironmentProblemError as error:
            reason = f"no compiler for {key.device.arch} here: {error}"
    tile = getattr(key.config, "tile", key.config)
    has_arithmetic = hasattr(tile, "shared_memory") and key.device.is_gpu
    return Inspection(
        key=key,
        source=generated.source,
        code=code,
        shared_memory=generated.shared_memory,
        expected_shared_memory=tile.shared_memory(key.problem, key.device) if has_arithmetic else None,
        compiled=compiled,
        no_compiler=reason,
        occupancy=occupancy(
            key.device,
            shared_memory=generated.shared_memory,
            threads=code.threads or 1,
            registers=compiled.registers if compiled else None,
        ),
    )


def document(found: Inspection) -> dict[str, Any]:
    """The report without the source, for ``--json`` and other commands."""
    return {
        "kernel": found.key.kind,
        "problem": format_problem(found.key.problem),
        "device": found.key.device,
        "config": found.key.config,
        "code": found.code,
        "source_bytes": len(found.source),
        "shared_memory": found.shared_memory,
        "expected_shared_memory": found.expected_shared_memory,
        "occupancy": found.occupancy,
        "compiled": found.compiled,
        "no_compiler": found.no_compiler,
        "faults": found.faults,
    }


def _table(found: Inspection) -> Table:
    key, code, compiled = found.key, found.code, found.compiled
    table = Table(title=f"{key.kind}, {format_problem(key.problem)}, {key.device.arch}", title_justify="left")
    table.add_column("what")
    table.add_column("value")
    for name, value in (
        ("config", key.config),
        ("threads", code.threads),
        ("matrix instructions", _listed(wgmma=code.wgmma, mma=code.mma, mfma=code.mfma)),
        ("copies", _listed(tma_loads=code.tma_loads, tma_stores=code.tma_stores, cp_async=code.cp_async)),
        (
            "barriers",
            _listed(
                mbarriers=code.mbarriers,
                mbarrier_waits=code.mbarrier_waits,
                syncthreads=code.syncthreads,
                named=code.named_barriers,
            ),
        ),
        ("registers of warpgroups", ", ".join(map(str, code.warpgroup_registers)) or None),
        ("offsets", f"32 bits: {', '.join(code.narrow_offsets)}" if code.narrow_offsets else "64 bits"),
        ("shared memory", _shared_memory(found)),
        ("blocks a multiprocessor", found.occupancy and f"{found.occupancy.blocks}, by {found.occupancy.limit}"),
        ("compiler", compiled.compiler if compiled else found.no_compiler),
        ("registers", compiled and compiled.registers),
        ("spills, stack", compiled and f"{compiled.spill_bytes} bytes, {compiled.stack_bytes} bytes"),
        ("machine instructions", compiled and _listed(**compiled.instructions)),
        ("compiler's notes", compiled and "\n".join(compiled.notes)),
    ):
        if value not in (None, ""):
            table.add_row(name, escape(str(value)))
    return table


def _listed(**counts: int) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"


def _shared_memory(found: Inspection) -> str:
    words = f"{found.shared_memory} bytes"
    if found.expected_shared_memory is not None:
        equal = found.expected_shared_memory == found.shared_memory
        words += ", as the config says" if equal else f"; the config says {found.expected_shared_memory}"
    return words


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise InvalidInputError(
            describe("--source", value=error, limit="it must be a file that can be written", remedy="Name another.")
        ) from error
