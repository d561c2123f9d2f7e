"""Compile all that a problem can ask for, before it is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch

from tl_backend.configs.choice import Chooser, PrefillConfig
from tl_backend.configs.decode import DecodeChoice, DecodeConfig
from tl_backend.device import DeviceSpec
from tl_backend.errors import EnvironmentProblemError
from tl_backend.ops.cache_write import cache_write_key, cache_write_problem
from tl_backend.ops.checks import check_supported
from tl_backend.ops.choices import chooser_for
from tl_backend.ops.compile_pool import TIMEOUT_S, CompilePool
from tl_backend.ops.compiled import KERNELS, KernelKey
from tl_backend.ops.decode import decode_keys
from tl_backend.ops.prefill import HOPPER, PORTABLE, prefill_keys
from tl_backend.problem import AttentionProblem

Progress = Callable[[int, int, str], None]


def required_kernels(
    problem: AttentionProblem,
    device: DeviceSpec,
    *,
    batch_invariant: bool = False,
    chooser: Chooser | None = None,
) -> list[KernelKey]:
    """Every kernel that plans of a problem and its cache write can ask for.

    Args:
        batch_invariant: of the workspaces that the plans are made in: they never decode.
        chooser: as for ``AttentionWorkspace``.

    Raises:
        UnsupportedError: the device does not serve the problem.
    """
    check_supported(problem, device)
    chooser = chooser or chooser_for(problem, device, batch_invariant=batch_invariant)
    keys = []
    for config in cast("tuple[PrefillConfig, ...]", chooser.configs("prefill")):
        keys += prefill_keys(problem, config, device, splits=not batch_invariant)
    if problem.is_paged and not batch_invariant:
        choices = cast("tuple[DecodeChoice, ...]", chooser.configs("decode"))
        for tile in dict.fromkeys(choice.tile for choice in choices):
            keys += [*decode_keys(problem, tile, device, split=False), *decode_keys(problem, tile, device, split=True)]
    if problem.is_paged:
        keys.append(cache_write_key(cache_write_problem(problem), device))
    return list(dict.fromkeys(keys))  # Tiles share their combine.


def prepare(
    problem: AttentionProblem,
    device: torch.device,
    *,
    batch_invariant: bool = False,
    on_progress: Progress | None = None,
) -> list[str]:
    """Compile the required kernels of a problem in this process, one after another.

    Where a table's row asks for a kernel that does not compile, the chooser drops the row. A default has to compile.

    Args:
        batch_invariant: as for ``required_kernels``.
        on_progress: called with (done, total, kind) before each kernel, and at the end with (total, total, "").

    Returns:
        The kinds of the kernels.

    Raises:
        UnsupportedError: the device does not serve the problem.
        EnvironmentProblemError: TileLang or a compiler is missing, or compilation failed.
    """
    spec = DeviceSpec.of(device)
    chooser = chooser_for(problem, spec, batch_invariant=batch_invariant)
    keys = required_kernels(problem, spec, batch_invariant=batch_invariant, chooser=chooser)
    for done, key in enumerate(keys):
        if on_progress is not None:
            on_progress(done, len(keys), key.kind)
        try:
            KERNELS.get(key)
        except EnvironmentProblemError as error:
            if not _drop(chooser, key, str(error)):
                raise
    if on_progress is not None:
        on_progress(len(keys), len(keys), "")
    return [key.kind for key in keys]


def _drop(chooser: Chooser, key: KernelKey, reason: str) -> bool:
    """Have a chooser do without the configs that need a kernel; False where it cannot."""
    if isinstance(key.config, DecodeConfig):
        return chooser.drop("decode", key.config.tile, reason)
    return key.kind in (PORTABLE, HOPPER) and chooser.drop("prefill", key.config, reason)


def fill_disk_cache(
    keys: Iterable[KernelKey],
    *,
    processes: int | None = None,
    timeout_s: float = TIMEOUT_S,
    on_progress: Progress | None = None,
) -> dict[KernelKey, str]:
    """Compile kernels side by side in processes of their own, into TileLang's disk cache (``TILELANG_CACHE_DIR``).

    This process compiles nothing: a later ``KERNELS.get`` loads from disk. TileLang's compiler is not safe in threads.

    Args:
        processes: default: one a core, as far as there is memory.
        timeout_s: a kernel that takes longer is given up.
        on_progress: called with (done, total, kind) after each kernel.

    Returns:
        The error of each kernel that did not compile, one that killed its process among them.
    """
    keys = list(dict.fromkeys(keys))
    errors = {}
    with CompilePool(processes=processes, timeout_s=timeout_s) as pool:
        pool.add(keys)
        for done in range(1, len(keys) + 1):
            outcome = pool.results.get()
            if outcome.error is not None:
                errors[outcome.key] = outcome.error
            if on_progress is not None:
                on_progress(done, len(keys), outcome.key.kind)
    return errors
