"""Which configs serve a problem here: from this device's tables, where they have a row, else the family default."""

from __future__ import annotations

from tl_backend.configs.choice import Chooser, FixedChooser
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem


def chooser_for(problem: AttentionProblem, device: DeviceSpec, *, batch_invariant: bool = False) -> Chooser:
    """The chooser of a problem on a device.

    Args:
        batch_invariant: one config for every batch: another tile would add in another order.

    Raises:
        UnsupportedError: no tile fits the device's shared memory.
    """
    del batch_invariant
    return FixedChooser(problem, device)
