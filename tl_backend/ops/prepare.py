"""Compile all that a problem can ask for, before it is asked."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple, cast

import torch

from tl_backend.cache_folder import cache_folder
from tl_backend.configs.choice import Chooser, PrefillConfig
from tl_backend.configs.decode import DecodeChoice, DecodeConfig
from tl_backend.device import DeviceSpec
from tl_backend.errors import EnvironmentProblemError
from tl_backend.ops.build import Built, Progress, build_kernels
from tl_backend.ops.cache_write import cache_write_key, cache_write_problem
from tl_backend.ops.checks import check_supported
from tl_backend.ops.choices import chooser_for
from tl_backend.ops.compiled import COMPILED, KERNELS, KERNELS_EVENT, LOADED, KernelKey
from tl_backend.ops.decode import decode_keys
from tl_backend.ops.kernel_store import KernelStore
from tl_backend.ops.prefill import HOPPER, PORTABLE, prefill_keys
from tl_backend.problem import AttentionProblem
from tl_backend.telemetry import launches


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


class Prepared(NamedTuple):
    """What ``prepare`` did. Attributes: compiled, loaded: kernels, by where they come from; seconds: taken."""

    compiled: int
    loaded: int
    seconds: float


def prepare(
    problems: Iterable[AttentionProblem],
    device: torch.device,
    *,
    batch_invariant: bool = False,
    processes: int | None = None,
    on_progress: Progress | None = None,
) -> Prepared:
    """Have every kernel that plans of these problems can ask for, from the kernel store or compiled into it.

    Where a table's row asks for a kernel that does not compile, the chooser drops the row. A default has to compile.
    What is compiled in this process afterwards is counted as a surprise.

    Args:
        batch_invariant: as for ``required_kernels``.
        processes, on_progress: as for ``build_kernels``.

    Raises:
        UnsupportedError: the device does not serve a problem.
        EnvironmentProblemError: TileLang or a compiler is missing, the kernel cache cannot be written, or compilation
            failed.
    """
    begun = time.monotonic()
    spec = DeviceSpec.of(device)
    needed: dict[KernelKey, list[Chooser]] = {}
    for problem in problems:
        chooser = chooser_for(problem, spec, batch_invariant=batch_invariant)
        for key in required_kernels(problem, spec, batch_invariant=batch_invariant, chooser=chooser):
            needed.setdefault(key, []).append(chooser)
    compiled = 0

    def progress(done: int, total: int, kind: str) -> None:
        nonlocal compiled
        compiled = done
        if on_progress is not None:
            on_progress(done, total, kind)

    missing = [key for key in needed if key not in KERNELS]
    for key, error in load_kernels(missing, processes=processes, on_progress=progress).items():
        if not all(_drop(chooser, key, error) for chooser in needed[key]):
            raise EnvironmentProblemError(error)
    for number in range(len(missing)):
        launches.record_event(KERNELS_EVENT, COMPILED if number < compiled else LOADED)
    KERNELS.expect_no_more()
    return Prepared(compiled, len(missing) - compiled, time.monotonic() - begun)


def _drop(chooser: Chooser, key: KernelKey, reason: str) -> bool:
    """Have a chooser do without the configs that need a kernel; False where it cannot."""
    if isinstance(key.config, DecodeConfig):
        return chooser.drop("decode", key.config.tile, reason)
    return key.kind in (PORTABLE, HOPPER) and chooser.drop("prefill", key.config, reason)


def load_kernels(
    keys: Iterable[KernelKey], *, processes: int | None = None, on_progress: Progress | None = None
) -> dict[KernelKey, str]:
    """Load kernels into this process, compiled side by side where the store lacks them.

    Args:
        processes, on_progress: as for ``build_kernels``.

    Returns:
        The error of each kernel that did not compile, one that killed its process among them.

    Raises:
        EnvironmentProblemError: as ``build_kernels``.
    """
    errors = _load(build_kernels(keys, processes=processes, on_progress=on_progress))
    # A library of another machine that shares the cache, whose system is newer: compiled here it may load.
    unloaded = [key for key, (_, was_built) in errors.items() if was_built]
    if unloaded:
        store = KernelStore(cache_folder())
        for key in unloaded:
            store.forget(key)
            del errors[key]
        errors |= _load(build_kernels(unloaded, processes=processes, on_progress=on_progress))
    return {key: error for key, (error, _) in errors.items()}


def _load(built: dict[KernelKey, Built]) -> dict[KernelKey, tuple[str, bool]]:
    """Errors, and whether the kernel is built and does not load."""
    errors = {}
    for key, outcome in built.items():
        if isinstance(outcome, str):
            errors[key] = (outcome, False)
            continue
        try:
            KERNELS.load(key, outcome)
        except EnvironmentProblemError as error:
            errors[key] = (str(error), True)
    return errors
