"""Which vLLM this plugin works with. Imports neither torch, TileLang nor vLLM."""

from __future__ import annotations

import re

from tl_backend.errors import describe

SUPPORTED_VLLM = ((0, 32), (0, 33))
VLLM_RANGE = "vllm>=0.32,<0.34"


def vllm_refusal(version: str) -> str | None:
    """Why this version of vLLM is not supported, or None."""
    release = re.match(r"(\d+)\.(\d+)", version)
    if release is not None and (int(release[1]), int(release[2])) in SUPPORTED_VLLM:
        return None
    return describe(
        "vLLM version",
        value=version,
        limit="the TileLang backend supports vLLM 0.32 and 0.33",
        remedy=f"Install '{VLLM_RANGE}' or a tl-backend for this vLLM, or drop --attention-backend tilelang.",
    )
