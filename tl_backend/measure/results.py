"""The file of a measurement: its rows with the machine they were measured on."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import Any

import torch


def environment(device: torch.device) -> dict[str, str]:
    """GPU, driver, versions and date."""
    if device.type == "cpu":
        return {"gpu": "none", "driver": "none"} | _versions()
    if torch.version.hip:  # The kernel module's version; its package manager's is the user's to add.
        path = Path("/sys/module/amdgpu/version")
        driver = path.read_text().strip() if path.exists() else "unknown"
        return {"gpu": torch.cuda.get_device_name(device), "driver": driver} | _versions()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[0]
    return {"gpu": torch.cuda.get_device_name(device), "driver": driver} | _versions()


def _versions() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "hip": str(torch.version.hip),
        "tilelang": importlib.metadata.version("tilelang"),
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
    }


def write_results(path: Path, rows: list[dict[str, Any]], ceiling: dict[str, float], device: torch.device) -> None:
    """The rows with the environment that they were measured in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"environment": environment(device), "ceilings": ceiling, "rows": rows}, indent=1) + "\n"
    )
