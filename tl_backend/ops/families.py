"""Where Hopper's own prefill does not take a problem of a Hopper GPU: it is counted, and named once in the log."""

from __future__ import annotations

import functools
import logging

from tl_backend.configs.key import ProblemKey
from tl_backend.configs.prefill_hopper import hopper_refusal
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem

# What is counted, at every step, with a text that says which problem and why.
PORTABLE_PREFILLS = "portable_prefills"

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM formats and shows only loggers below its own.


def portable_reason(problem: AttentionProblem, device: DeviceSpec) -> str | None:
    """Which problem the portable prefill serves where one would expect Hopper's, and why; None elsewhere.

    Says it in the log, once a class of problems.
    """
    if device.arch != "sm_90" or (reason := hopper_refusal(problem, device)) is None:
        return None
    what = f"{ProblemKey.of(problem)}: {reason}"
    _say(what)
    return what


@functools.cache
def _say(what: str) -> None:
    logger.warning("TileLang attention takes the portable prefill, not Hopper's own, for %s.", what)
