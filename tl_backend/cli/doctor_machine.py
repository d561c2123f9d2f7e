"""Checks of the machine: devices, tables, folders, compiler, space. A GPU is asked for its properties, no more."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tl_backend.cli.doctor_packages import ENTRY_POINT, PLUGIN, PLUGIN_GROUP, installed, vllm_version
from tl_backend.cli.doctor_rows import Finding, ok, problem, warning
from tl_backend.configs.identity import device_identity
from tl_backend.configs.lookup import Tables
from tl_backend.device import DeviceSpec
from tl_backend.errors import EnvironmentProblemError, TLBackendError
from tl_backend.settings import Settings
from tl_backend.vllm_plugin.versions import vllm_refusal

# A kernel takes about 1 MiB on disk, a table of models some hundred kernels, and nvcc tens of MiB of temporary files.
LITTLE_SPACE, NO_SPACE = 1 << 30, 100 << 20
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
KERNELS = "kernel cache"
MAX_FILES = 100_000  # Of a cache whose size is asked: a network's folder answers slowly.


def check_devices() -> Iterator[Finding]:
    """Every device that torch shows, and what tables call it."""
    import torch

    visible = ", ".join(f"{name}={os.environ[name]!r}" for name in VISIBLE if name in os.environ)
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        if built:
            remedy = "Check the driver (nvidia-smi, rocm-smi), and that the user may open /dev/nvidia* or /dev/kfd."
            yield problem(
                "device", f"torch is built for a GPU and sees none{f' ({visible})' if visible else ''}", remedy
            )
        else:
            yield ok("device", "CPU: this torch knows no GPU")
        return
    for index in range(torch.cuda.device_count()):
        try:
            spec = DeviceSpec.of(torch.device("cuda", index))
        except TLBackendError as error:
            yield problem(f"device {index}", error)
            continue
        yield ok(f"device {index}", f"{spec.name}: {device_identity(spec)}")
    if visible:
        yield ok("visible devices", visible)


def check_table(device: DeviceSpec) -> Iterator[Finding]:
    """The tables that launches take their configs from."""
    settings = Settings.from_env()
    if not settings.tables:
        yield warning("table", "none is read: TL_BACKEND_TABLES=0", "Unset it to use the tuned rows.")
        return
    with _quiet():
        tables = Tables.load(device, settings.table_dir)
    for message in tables.bad_files:
        yield problem("table", message)
    for table in tables.tables:
        origin = "the user's" if table.generation else "shipped"
        rows = f"{len(table.rows)} rows, {len(table.settled)} settled, {table.provenance.date}"
        there, here = table.toolchain.tilelang, installed("tilelang")
        if there == here:
            yield ok("table", f"{origin}: {table.label}, {rows}, tuned with TileLang {there}")
        else:
            remedy = "`tl-backend tune` here, since another compiler may make another config the best."
            yield warning(
                "table", f"{origin}: {table.label}, {rows}, tuned with TileLang {there}; here is {here}", remedy
            )
    if not tables.tables and not tables.bad_files:
        said = f"none for {tables.identity}: every launch takes the family default"
        yield warning("table", said, "`tl-backend tune` writes one.") if device.is_gpu else ok("table", said)
    if tables.skipped:
        first, count = next(iter(tables.skipped.values())), len(tables.skipped)
        remedy = "See `tl-backend table validate`; tune again with this version."
        yield warning("table rows", f"{count} skipped; the first: {first}", remedy)


def check_cache() -> Iterator[Finding]:
    """The cache of compiled kernels, and TileLang's own where that lies elsewhere."""
    folders = _caches()
    if not folders:
        remedy = "Set TL_BACKEND_CACHE_DIR to a folder of your own."
        yield problem("kernel cache", "no home can be written, and the folder for that case is not this user's", remedy)
    settings = Settings.from_env()
    for (name, variable), folder in folders.items():
        if (reason := _unwritable(folder)) is not None:
            yield problem(name, f"{folder}: {reason}", f"Set {variable} to a folder that can be written.")
        elif name == KERNELS and folder != settings.cache_dir:
            remedy = f"Set {variable} to a folder that stays."
            yield warning(name, f"{folder}, {_size(folder)}: no home can be written, and it may be cleared", remedy)
        else:
            yield ok(name, f"{folder}, {_size(folder)}")


def check_compiler(device: DeviceSpec) -> Iterator[Finding]:
    """The compiler that TileLang would take, and its version."""
    from tl_backend.ops.environment import compiler_problem, find_compiler

    compiler = find_compiler(device.vendor)
    if compiler is None:
        yield problem("compiler", compiler_problem(device))
        return
    answer = subprocess.run([str(compiler), "--version"], capture_output=True, text=True, timeout=60, check=False)
    lines = [line for line in answer.stdout.splitlines() if line.strip()]
    said = next(
        (line for line in lines if "release" in line or "version" in line.lower()), (lines or ["no version"])[0]
    )
    if answer.returncode:
        yield problem("compiler", f"{compiler} --version ends with {answer.returncode}", "Install it again.")
    else:
        yield ok("compiler", f"{compiler}: {said.strip()}")


def check_home() -> Iterator[Finding]:
    """The home, where caches and tables lie unless variables say otherwise."""
    home = os.environ.get("HOME")
    remedy = "Set HOME to a folder that can be written; or TL_BACKEND_CACHE_DIR, TL_BACKEND_TABLE_DIR, VLLM_CACHE_ROOT."
    if not home:
        yield warning("HOME", "not set", remedy)
    elif (reason := _unwritable(Path(home))) is not None:
        yield warning("HOME", f"{home}: {reason}", remedy)
    else:
        yield ok("HOME", home)


def check_space() -> Iterator[Finding]:
    """Free space where kernels are compiled and kept."""
    folders = {f"space, {name}": folder for (name, _), folder in _caches().items()}
    for name, folder in (folders | {"space, temporary files": Path(tempfile.gettempdir())}).items():
        free = shutil.disk_usage(_existing(folder)).free
        value, remedy = f"{free / 2**30:.1f} GiB free", "Make room: kernels are compiled and kept there."
        yield (
            problem(name, value, remedy)
            if free < NO_SPACE
            else warning(name, value, remedy)
            if free < LITTLE_SPACE
            else ok(name, value)
        )


def check_outcome(device: DeviceSpec) -> Iterator[Finding]:
    """What ``vllm serve --attention-backend tilelang`` would do here: as the plugin decides, without importing vLLM."""
    from tl_backend.ops.environment import start_problem

    version = vllm_version()
    allowed = os.environ.get("VLLM_PLUGINS")
    reason = None
    if version is None:
        reason = "vLLM is not installed"
    elif not any(plugin.value == ENTRY_POINT for plugin in importlib.metadata.entry_points(group=PLUGIN_GROUP)):
        reason = "vLLM does not find the plugin, and knows no backend of this name"
    elif allowed is not None and PLUGIN not in allowed.split(","):
        reason = "VLLM_PLUGINS leaves the plugin out, and vLLM knows no backend of this name"
    else:
        reason = vllm_refusal(version) or start_problem(device)
    on_cpu = not device.is_gpu and not Settings.from_env().cpu
    if on_cpu and reason is None:
        yield warning(
            "outcome", "refused on vLLM's CPU build; without the flag its own backend serves", "Set TL_BACKEND_CPU=1."
        )
    elif reason is None:
        yield ok("outcome", f"vllm serve --attention-backend tilelang runs TileLang kernels on {device.name}")
    else:
        yield problem("outcome", f"vllm serve --attention-backend tilelang is refused: {reason}", "See the rows above.")


def _caches() -> dict[tuple[str, str], Path]:
    """Folders of compiled kernels by name and the variable that says where; none where there is no such folder."""
    from tl_backend.cache_folder import TILELANG_VARIABLE, cache_folder, tilelang_folder

    try:
        folder, tilelangs = cache_folder(), tilelang_folder()
    except EnvironmentProblemError:
        return {}
    found = {(KERNELS, "TL_BACKEND_CACHE_DIR"): folder}
    if not tilelangs.is_relative_to(folder):
        found["TileLang's cache", TILELANG_VARIABLE] = tilelangs
    return found


def _unwritable(folder: Path) -> str | None:
    """Why files cannot be made in a folder, which need not be there yet; or None."""
    there = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return f"{there} cannot be written ({error.strerror})"


def _existing(path: Path) -> Path:
    return next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))


def _size(folder: Path) -> str:
    total, count = 0, 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(where) / name).stat().st_size
            count += 1
            if count == MAX_FILES:
                return f"more than {total / 2**20:.0f} MiB in more than {count} files"
    return f"{total / 2**20:.0f} MiB in {count} files"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the log lines of the look-up: the rows say the same."""
    logger = logging.getLogger("vllm.tl_backend")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
