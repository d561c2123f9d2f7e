"""What CPU_ATTN is on vLLM's CPU platform, which takes that backend whatever ``--attention-backend`` says.

A member of the registry leads here by its name, is looked up whenever vLLM selects it, and is then one of:

- with ``TL_BACKEND_CPU=1``, the TileLang backend on the C target (or what refuses in its place);
- with ``--attention-backend tilelang`` but not the variable, an error: vLLM would serve with its own backend instead;
- otherwise vLLM's own class.

CPU_MLA and AMX_MLA, which that platform takes for MLA models, are vLLM's own or an error: no kernel here has MLA.
"""

from __future__ import annotations

import os

from tl_backend.errors import EnvironmentProblemError, describe
from tl_backend.vllm_plugin import register
from tl_backend.vllm_plugin.layer import refuse


def __getattr__(name: str) -> type:
    if name in register.CPU_MEMBERS:
        return _choose(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _choose(member: str) -> type:
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    # A malformed value asks for something too; the refusal says what is wrong with it.
    asked = os.environ.get("TL_BACKEND_CPU", "0") not in ("0", "")
    if not asked and not _named():
        builtin: type = resolve_obj_by_qualname(AttentionBackendEnum[member].value)
        return builtin
    if reason := register.refusal():
        raise EnvironmentProblemError(reason)
    if not asked:
        raise EnvironmentProblemError(
            describe(
                "--attention-backend tilelang on vLLM's CPU platform",
                value="TL_BACKEND_CPU unset",
                limit="there TileLang takes over from vLLM's own backend only on request",
                remedy="Set TL_BACKEND_CPU=1 (and --dtype float32), or drop --attention-backend.",
            )
        )
    if member != "CPU_ATTN":
        refuse("attention of this model", "MLA", "decoder attention with keys and values of one head size is supported")
    from tl_backend.vllm_plugin.backend import TileLangBackend

    return TileLangBackend


def _named() -> bool:
    """The current vLLM config names this backend."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None:
        return False
    attention = config.attention_config
    return any(
        member is not None and member.name == register.NAME
        for member in (attention.backend, *attention.backend_per_kind.values())
    )
