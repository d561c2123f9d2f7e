"""``tl-backend prebuild``: fill the kernel cache before any server starts, on a machine without the GPU, too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from tl_backend.cli.options import ArchOption, MultiprocessorsOption, ProcessesOption, check_runs_here, device_of
from tl_backend.cli.output import JsonOption, people, print_json, progress
from tl_backend.cli.problems import (
    EveryOption,
    ModelOption,
    PageSizeOption,
    ProblemsOption,
    TPOption,
    chosen_problems,
)

SOME_FAILED = 1


def prebuild(
    problem: ProblemsOption = None,
    model: ModelOption = None,
    every: EveryOption = False,
    tp_size: TPOption = 1,
    page_size: PageSizeOption = None,
    folder: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Default: the cache of TL_BACKEND_CACHE_DIR.")
    ] = None,
    processes: ProcessesOption = None,
    arch: ArchOption = None,
    multiprocessors: MultiprocessorsOption = None,
    json: JsonOption = False,
) -> None:
    """Compile what a server will need into the kernel cache, so that it starts without compiling.

    For an image, or on a shared volume: the GPU need not be here, its compiler must. A server finds a kernel if its
    model, block size, tensor-parallel size, kind of GPU, tables and versions are those that were named here.

    \b
    Examples:
      tl-backend prebuild --model /path/to/config.json --arch h200
      tl-backend prebuild --problem 32/8,D128,page128,bfloat16 --arch h100 --out /kernels
    """  # noqa: D301 click wants the character.
    from rich.progress import Progress

    from tl_backend.cache_folder import cache_folder
    from tl_backend.ops.build import build_kernels
    from tl_backend.ops.driver_stub import linkable_driver
    from tl_backend.ops.kernel_store import KernelStore
    from tl_backend.ops.prepare import required_kernels

    device = device_of(arch, multiprocessors)
    problems = chosen_problems(problem, model, every, tp_size, page_size, device)
    for one in problems:
        check_runs_here(one, device)
    keys = [key for one in problems for key in required_kernels(one, device)]
    store, compiled = KernelStore(folder or cache_folder()), 0
    with Progress(console=progress(), transient=True) as bar, linkable_driver(device):
        task = bar.add_task("compiling", total=len(keys))

        def show(done: int, total: int, kind: str) -> None:
            nonlocal compiled
            compiled = done
            bar.update(task, completed=done, total=total, description=f"compiling {kind}")

        built = build_kernels(keys, store=store, processes=processes, on_progress=show)
    failed = {
        f"{key.kind} of {key.problem} with {key.config}": error
        for key, error in built.items()
        if isinstance(error, str)
    }
    if json:
        counts = {"kernels": len(built), "compiled": compiled - len(failed), "found": len(built) - compiled}
        print_json({"folder": store.folder, "device": device.name, **counts, "failed": failed})
    else:
        console = people()
        there = len(built) - compiled
        console.print(f"{compiled - len(failed)} compiled, {there} were there: {store.folder}", markup=False)
        for what, error in failed.items():
            console.print(f"[bold red]failed[/] {escape(what)}: {escape(error)}")
    if failed:
        raise typer.Exit(SOME_FAILED)
