"""Code of many kernels at once, for a device that need not be here."""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.connection import Connection

from rich.console import Console

from tl_backend.ops.compile_pool import CompilePool
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.launcher import Artifact

SAY_EVERY = 10  # Kernels.


def generate_all(keys: Iterable[KernelKey], processes: int | None, console: Console) -> dict[KernelKey, str]:
    """Generate each kernel's code; the errors of those that have none."""
    keys, failed = list(keys), {}
    with CompilePool(processes=processes, serve=generate_kernels) as pool:
        pool.add(keys)
        for done in range(1, len(keys) + 1):
            outcome = pool.results.get()
            if outcome.error is not None:
                failed[outcome.key] = outcome.error
            if done % SAY_EVERY == 0 or done == len(keys):
                console.print(f"{done} of {len(keys)} kernels: code generated, {len(failed)} failed")
    return failed


def generate_kernels(connection: Connection) -> None:
    """Generate the code of each key that comes: what a process of the pool does."""
    from tl_backend.ops.codegen import generate

    connection.send(None)
    while True:
        key = connection.recv()
        try:
            generate(key)
        except Exception as error:  # noqa: BLE001
            connection.send((None, f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"))
        else:
            connection.send((Artifact("", (), key.device.is_gpu), None))
