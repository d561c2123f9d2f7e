"""The entry point: makes ``--attention-backend tilelang`` a name that vLLM knows, in every one of its processes.

vLLM calls ``register`` in the API server, the engine core, each worker and the model inspection subprocess. So it is
light and idempotent, and it never raises: vLLM does not catch, and a broken plugin would stop servers that never asked
for it. What stands in the way is logged once, and asking for the backend then fails with that message
(``refused.RefusedBackend``) instead of serving with another one. This module imports neither torch, TileLang nor vLLM.

``LLM(attention_config={"backend": "tilelang"})`` looks the name up before vLLM loads its plugins: call ``register()``
first, or use ``LLM(attention_backend="tilelang")``.
"""

from __future__ import annotations

import copyreg
import logging
import multiprocessing
from typing import TYPE_CHECKING, Any

from tl_backend.errors import TLBackendError
from tl_backend.settings import Settings
from tl_backend.telemetry import launches
from tl_backend.vllm_plugin import versions

if TYPE_CHECKING:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

NAME = "TILELANG"
BACKEND_PATH = "tl_backend.vllm_plugin.backend.TileLangBackend"
REFUSED_PATH = "tl_backend.vllm_plugin.refused.RefusedBackend"
CPU_CHOICE_PATH = "tl_backend.vllm_plugin.cpu_choice"
CPU_MEMBERS = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM formats and shows only loggers below its own.
_said: set[str] = set()
_is_child = False


def register() -> None:
    """Register the backend with the vLLM of this process. Calling it again changes nothing."""
    reason = refusal()
    if reason is not None:
        _say_once(f"The TileLang attention backend is unavailable. {reason}")
    try:
        _register(REFUSED_PATH if reason else BACKEND_PATH)
    except Exception as error:  # noqa: BLE001
        _say_once(f"The TileLang attention backend could not be registered. {type(error).__name__}: {error}")


def refusal() -> str | None:
    """Why the backend cannot serve in this environment, or None. Never raises."""
    try:
        from vllm.version import __version__ as vllm_version

        if reason := versions.vllm_refusal(vllm_version):
            return reason
        from vllm.platforms import current_platform

        from tl_backend.device import DeviceSpec
        from tl_backend.ops.environment import start_problem

        asked_on_cpu = Settings.from_env().cpu
        if current_platform.is_cpu():
            return start_problem(DeviceSpec.absent("c")) if asked_on_cpu else None
        # Which GPU it is does not matter yet, and asking would start CUDA in the API server.
        return start_problem(DeviceSpec.absent("gfx942" if current_platform.is_rocm() else "sm_90"))
    except TLBackendError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def _register(path: str) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    known = NAME in AttentionBackendEnum.__members__
    register_backend(AttentionBackendEnum[NAME] if known else NAME, path)
    # Enum members pickle by value, and a spawned process unpickles vLLM's config before it loads plugins, when the
    # value of a member that a plugin added means nothing.
    copyreg.pickle(AttentionBackendEnum, _reduce)
    if _is_cpu():
        # The CPU platform ignores the name and takes its own; cpu_choice decides what they are.
        for member in CPU_MEMBERS:
            register_backend(AttentionBackendEnum[member], f"{CPU_CHOICE_PATH}.{member}")
    elif path == BACKEND_PATH and Settings.from_env().cpu:
        _say_once("TL_BACKEND_CPU=1 has no effect: this is not vLLM's CPU platform.", logging.WARNING)
    if path == BACKEND_PATH:
        launches.start_snapshots()


def _reduce(member: AttentionBackendEnum) -> tuple[Any, tuple[Any, ...]]:
    """How to pickle a member: ours by name, vLLM's own as before."""
    return (_restore, (member.name,)) if member.name == NAME else (type(member), (member.value,))


def _restore(name: str) -> AttentionBackendEnum:
    global _is_child
    # Python does not know yet: it unpickles a child's arguments before it calls it one.
    _is_child = True
    register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[name]


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _say_once(message: str, level: int = logging.ERROR) -> None:
    """Log once a process, and for the user once a server: the children of the first process say it at debug level."""
    if message not in _said:
        _said.add(message)
        is_child = _is_child or multiprocessing.parent_process() is not None
        logger.log(logging.DEBUG if is_child else level, message)
