"""Compiled kernels on disk: from a key to its library without tracing a program or importing a compiler.

One folder, ``TL_BACKEND_CACHE_DIR``: an entry (JSON) and a library a kernel, and TileLang's own cache beside them. Any
number of processes, users' ranks among them, may share it: what is published is whole, and a lock is let go when its
process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.resources
import json
import logging
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tl_backend.device import DeviceSpec
from tl_backend.errors import EnvironmentProblemError, describe
from tl_backend.ops.compiled import KernelKey
from tl_backend.ops.environment import find_compiler
from tl_backend.ops.launcher import ARGUMENT_TYPES, Artifact
from tl_backend.telemetry import launches

# What a kernel's code is made of, apart from TileLang: if a file of these changes, kernels are compiled anew.
SOURCES = ("kernels", "configs", "ops/compiled.py", "problem.py", "device.py")
PACKAGES = ("tilelang", "apache-tvm-ffi")
BAD_ENTRIES = "bad_cache_entries"
# Without these a file system has no locks: kernels may be compiled twice then, and are published whole all the same.
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM formats and shows only loggers below its own.


class _Entry(BaseModel):
    """A kernel's file.

    Attributes:
        name: of the entry.
        what: for people.
        sha256: of the library, which lies beside the entry under the same name.
        types, on_gpu: as of ``Artifact``.
        compiler: what it calls itself.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    what: str
    sha256: str
    types: list[str]
    on_gpu: bool
    compiler: str


class KernelLock:
    """That nobody else compiles a kernel; ends with ``release`` or with this process."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # Though a fork of this process has it open, too.
            os.close(self._descriptor)
            self._descriptor = None


class KernelStore:
    """The kernels of a folder, which is made when the first is put there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()  # A library without a folder would be searched for elsewhere.

    def find(self, key: KernelKey) -> Artifact | None:
        """The library of a kernel, if it is here, whole, and of the compiler that is here now, if one is.

        What is broken costs one log line and one count, and is as good as absent.
        """
        name = digest(key)
        library = self.folder / f"{name}.so"
        try:
            entry = _Entry.model_validate_json((self.folder / f"{name}.json").read_bytes())
            intact = _sha256(library) == entry.sha256 and entry.name == name
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValidationError) as error:
            self._report(name, str(error).splitlines()[0])
            return None
        if not intact or not ARGUMENT_TYPES.keys() >= set(entry.types):
            self._report(name, "it or its library is not what was stored")
            return None
        if entry.compiler != (compiler_version(key.device) or entry.compiler):
            return None
        return Artifact(str(library), tuple(entry.types), entry.on_gpu)

    def put(self, key: KernelKey, artifact: Artifact) -> Artifact:
        """Publish a kernel's library: whole, or not at all.

        Raises:
            EnvironmentProblemError: the folder cannot be written, or is full.
        """
        name = digest(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            entry = _Entry(
                name=name,
                what=f"{key.kind} of {key.problem} with {key.config} for {key.device.arch}",
                sha256=_sha256(Path(artifact.path)),
                types=list(artifact.types),
                on_gpu=artifact.on_gpu,
                compiler=compiler_version(key.device) or "",
            )
            library = self._publish(f"{name}.so", Path(artifact.path).read_bytes())
            self._publish(f"{name}.json", entry.model_dump_json(indent=1).encode())
        except OSError as error:
            raise _unusable(self.folder, error.strerror or str(error)) from error
        return artifact._replace(path=str(library))

    def forget(self, key: KernelKey) -> None:
        """Have a kernel compiled anew: its library, though whole, is of no use here."""
        with contextlib.suppress(OSError):
            (self.folder / f"{digest(key)}.json").unlink()

    def lock(self, key: KernelKey) -> KernelLock | None:
        """The right to compile a kernel; None while another process, or another holder in this one, has it.

        Raises:
            EnvironmentProblemError: the folder cannot be written.
        """
        path = self.folder / "locks" / digest(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Never removed: whoever holds the lock of a name that is gone shuts nobody out.
            descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if isinstance(error, PermissionError) and os.access(self.folder, os.W_OK):
                return KernelLock(None)  # Another user's: kernels can be published all the same.
            raise _unusable(path, error.strerror or str(error)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            return KernelLock(None) if error.errno in _NO_LOCKS else None
        return KernelLock(descriptor)

    def _publish(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        descriptor, partial = tempfile.mkstemp(prefix=f"{name}.", suffix=".partial", dir=self.folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            Path(partial).chmod(0o644)
            Path(partial).replace(path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
        return path

    def _report(self, name: str, reason: str) -> None:
        launches.record_event(BAD_ENTRIES, name)
        logger.warning("kernel cache: %s in %s is compiled anew: %s", name, self.folder, reason)


def _unusable(folder: Path, reason: str) -> EnvironmentProblemError:
    """What to say of a folder that kernels cannot be put in."""
    return EnvironmentProblemError(
        describe(
            f"kernel cache {folder}",
            value=reason,
            limit="kernels that are not in it yet are written there, about 1.3 MB each",
            remedy="Make room and make it writable, or set TL_BACKEND_CACHE_DIR to a folder that is.",
        )
    )


def digest(key: KernelKey) -> str:
    """Name of a kernel in the store: of all that its code depends on, and of nothing else (not the device's name)."""
    device = dataclasses.asdict(key.device)
    del device["name"]
    facts = {
        "kind": key.kind,
        "problem": _plain(key.problem),
        "config": _plain(key.config),
        "device": device,
        "machine": platform.machine(),
        "packages": [_version(package) for package in PACKAGES],
        "sources": source_hash(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def compiler_version(device: DeviceSpec) -> str | None:
    """What the compiler of a device calls itself; None where there is none."""
    path = find_compiler(device.vendor)
    return None if path is None else _says(path, path.stat().st_mtime_ns)


@functools.cache
def _says(compiler: Path, _changed: int) -> str:
    try:
        answer = subprocess.run(
            [compiler, "--version"], capture_output=True, env={**os.environ, "LC_ALL": "C"}, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " ".join(answer.stdout.decode(errors="replace").split())[:300]


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def source_hash() -> str:
    """Of all files that kernels are made of."""
    root = Path(str(importlib.resources.files("tl_backend")))
    found = hashlib.sha256()
    for source in SOURCES:
        path = root / source
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            found.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return found.hexdigest()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, dataclasses.asdict(value)]
    return value


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
