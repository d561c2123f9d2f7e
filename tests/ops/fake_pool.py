"""A compile pool without processes or compilers, for tests of what stands around it."""

from __future__ import annotations

import os
import queue
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tl_backend.device import DeviceSpec
from tl_backend.ops import build
from tl_backend.ops.compile_pool import Compiled
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.kernel_store import KernelStore
from tl_backend.ops.launcher import Artifact
from tl_backend.testing.cases import make_problem

DEVICE = DeviceSpec.absent("c")
KEYS = [KernelKey("copy", make_problem(2, 1, 32, 16 * (1 + number)), number, DEVICE) for number in range(6)]
CONTENT = b"library " * 50_000  # Long enough for a reader to find half of it.


class FakePool:
    """``CompilePool`` in this process: writes to ``log`` which kernels it was given.

    Attributes:
        errors: of the kernels that do not compile.
        same_program: answer all keys with one library, as TileLang does where their programs are the same.
    """

    log: Path | None = None
    errors: dict[KernelKey, str]
    processes = 2
    added: list[KernelKey]
    same_program = False

    def __init__(self, **_: Any) -> None:
        self._library: str | None = None
        self.results: queue.Queue[Compiled] = queue.Queue()

    def __enter__(self) -> FakePool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add(self, keys: Iterable[KernelKey]) -> None:
        for key in keys:
            self.added.append(key)
            if self.log is not None:
                with self.log.open("a") as file:
                    file.write(f"{key.config}\n")
                time.sleep(0.002)
            if error := self.errors.get(key):
                self.results.put(Compiled(key, None, error, 0.0))
                continue
            if self._library is None or not self.same_program:
                descriptor, self._library = tempfile.mkstemp(suffix=".so")
                with os.fdopen(descriptor, "wb") as file:
                    file.write(CONTENT)
            self.results.put(Compiled(key, Artifact(self._library, ("int64",), False), None, 0.0))


def main() -> None:
    """Build all keys in each of the folders named; fail where a library is not whole."""
    FakePool.errors, FakePool.added = {}, []
    build.CompilePool = FakePool  # type: ignore[assignment, misc]
    print("ready", flush=True)
    sys.stdin.readline()
    for name in sys.argv[1:]:
        FakePool.log = Path(name) / "log"
        found = build.build_kernels(KEYS, store=KernelStore(Path(name) / "cache"))
        for key in KEYS:
            built = found[key]
            assert isinstance(built, Artifact)
            assert Path(built.path).read_bytes() == CONTENT


if __name__ == "__main__":
    main()
