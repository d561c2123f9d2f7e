"""Which family of prefill kernels a run takes, where a device has two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from tests.gpu.long_contexts import Extreme
from tl_backend.configs import choice
from tl_backend.configs.choice import Config
from tl_backend.configs.prefill import default_prefill_config
from tl_backend.configs.prefill_hopper import hopper_refusal
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem
from tl_backend.testing.problems import Work

# default: every problem, by the family that serves it; hopper: of these what Hopper's family takes; portable: the same
# problems by the portable family, which serves them where a table says so. The first and the last are everything.
FAMILIES = ("default", "hopper", "portable")
# Launches that a run of a family must have, and those that it must not have.
LAUNCHES = {"hopper": ("prefill_hopper", "prefill"), "portable": ("prefill", "prefill_hopper")}


def of_family(
    family: str, work: list[Work], more: list[Extreme], device: DeviceSpec
) -> tuple[list[Work], list[Extreme]]:
    """What of a sweep concerns a family."""
    if family == "default":
        return work, more

    def concerned(item: Work | Extreme) -> bool:
        return "prefill" in item.kinds and hopper_refusal(item.problem, device) is None

    # No family changes what the cache write does.
    chosen = [replace(item, kinds=tuple(kind for kind in item.kinds if kind != "cache_write")) for item in work]
    return [item for item in chosen if concerned(item)], [item for item in more if concerned(item)]


@contextmanager
def forced_family(family: str) -> Iterator[None]:
    """With "portable", the default of every prefill is the portable family's; for runs without tables."""
    if family != "portable":
        yield
        return
    default = choice.default_config

    def portable(kind: str, problem: AttentionProblem, device: DeviceSpec) -> Config:
        return default_prefill_config(problem, device) if kind == "prefill" else default(kind, problem, device)

    with mock.patch.object(choice, "default_config", portable):
        yield


def strangers(family: str, launched: dict[str, int]) -> str:
    """What a run launched that it should not have, or did not launch and should; empty if neither."""
    if family not in LAUNCHES:
        return ""
    wanted, unwanted = LAUNCHES[family]
    if launched.get(wanted, 0) > 0 and not launched.get(unwanted):
        return ""
    return (
        f"{launched.get(wanted, 0)} launches of {wanted} and {launched.get(unwanted, 0)} of {unwanted}; a run of the "
        f"{family} family has some and none"
    )
