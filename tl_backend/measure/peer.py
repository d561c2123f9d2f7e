"""What a peer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tl_backend.errors import TLBackendError
from tl_backend.measure.timing import Launch
from tl_backend.measure.workload import Batch


class NotThereError(TLBackendError):
    """A peer that is not installed, or does not serve a problem: its message says which."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another implementation on the tensors of a batch.

    Attributes:
        what: the program and its version, for people.
        launch: one attention; what is prepared once a step is prepared already.
        output: ``[T, H, D]`` of the last launch.
        prepare: what is done once a step, as often as it is called; None for nothing.
    """

    what: str
    launch: Launch
    output: Callable[[], torch.Tensor]
    prepare: Launch | None = None


def refuse_features(batch: Batch, *served: str) -> None:
    """Raise NotThereError for a feature of the problem that is not among those served.

    Args:
        served: of "window", "soft cap", "sinks", "ALiBi", "8-bit cache", "log-sum-exp".
    """
    p = batch.workload.problem
    asked = {
        "window": p.window is not None,
        "soft cap": p.soft_cap is not None,
        "sinks": p.sinks_dtype is not None,
        "ALiBi": p.has_alibi,
        "8-bit cache": p.is_quantized,
        "log-sum-exp": p.returns_lse,
    }
    if missing := [name for name, there in asked.items() if there and name not in served]:
        raise NotThereError(f"it is not asked for {', '.join(missing)} here")
