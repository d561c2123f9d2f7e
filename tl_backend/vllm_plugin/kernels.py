"""The kernels of a KV-cache group, compiled before the server is ready."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm  # A dependency of vLLM.
from vllm import envs
from vllm.distributed.parallel_state import is_global_first_rank

from tl_backend import ops
from tl_backend.ops.compile_pool import num_processes
from tl_backend.problem import AttentionProblem

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM formats and shows only loggers below its own.


def prepare_kernels(problems: Iterable[AttentionProblem], device: torch.device, config: VllmConfig) -> None:
    """Have all that these problems can ask for; raises as ``ops.prepare``.

    The ranks of a host share its cores, and no kernel is compiled by two of them.
    """
    parallel = config.parallel_config
    ranks = parallel.local_world_size * max(1, parallel.data_parallel_size_local)
    with _Bar() as bar:
        prepared = ops.prepare(
            problems,
            device,
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
            processes=max(1, num_processes() // ranks),
            on_progress=bar.show,
        )
    if is_global_first_rank():
        logger.info(
            "TileLang kernels: %d compiled, %d from the kernel cache, %.1f s",
            prepared.compiled,
            prepared.loaded,
            prepared.seconds,
        )


class _Bar:
    """A progress bar as vLLM has them, on the first rank, where there is something to wait for."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, done: int, total: int, kind: str) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, desc="Compiling TileLang kernels", disable=not is_global_first_rank())
        self._bar.set_postfix_str(kind, refresh=False)
        self._bar.update(done - self._bar.n)
