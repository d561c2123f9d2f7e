"""Which configs serve a problem here: from this device's tables, where they have a row, else the family default."""

from __future__ import annotations

import functools
from pathlib import Path

from tl_backend.configs.choice import FAMILY_DEFAULT, Chooser, FixedChooser
from tl_backend.configs.lookup import Tables
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem
from tl_backend.settings import Settings
from tl_backend.telemetry import launches


def chooser_for(problem: AttentionProblem, device: DeviceSpec, *, batch_invariant: bool = False) -> Chooser:
    """The chooser of a problem on a device.

    Args:
        batch_invariant: one config for every batch: another tile would add in another order.

    Raises:
        UnsupportedError: no tile fits the device's shared memory.
        InvalidInputError: a ``TL_BACKEND_*`` variable is malformed.
    """
    if batch_invariant:
        return FixedChooser(problem, device, source=f"{FAMILY_DEFAULT}, for batch invariance")
    settings = Settings.from_env()
    if not settings.tables:
        return FixedChooser(problem, device, source=f"{FAMILY_DEFAULT}, as TL_BACKEND_TABLES=0 asks")
    return tables_of(device, settings.table_dir).chooser(problem)


@functools.cache
def tables_of(device: DeviceSpec, user_folder: Path | None) -> Tables:
    """The tables of a device, loaded once a process: later generations serve the processes that start after them."""
    return Tables.load(device, user_folder, count=launches.record_event)
