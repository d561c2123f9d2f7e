"""What stands in the backend's place where it cannot serve: whatever vLLM asks of it raises the reason."""

from __future__ import annotations

from typing import NoReturn

from tl_backend.errors import EnvironmentProblemError
from tl_backend.vllm_plugin import register


class _Refusing(type):
    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # Python's own probes.
        raise EnvironmentProblemError(
            register.refusal() or "The TileLang attention backend failed to register: see the log."
        )


class RefusedBackend(metaclass=_Refusing):
    """Registered as TILELANG for an unsupported vLLM, without TileLang, or without a compiler.

    Not a subclass of vLLM's AttentionBackend, whose defaults would answer the first questions, and which an unsupported
    vLLM may not have. An ImportError would not do: on ROCm vLLM reports only that word.
    """
