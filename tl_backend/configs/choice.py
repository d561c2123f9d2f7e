"""What decides the config of a launch: the interface between tables, the tuner and ``ops``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tl_backend.configs.decode import DecodeChoice, default_decode_choice
from tl_backend.configs.prefill import default_prefill_config
from tl_backend.configs.prefill_hopper import HopperPrefillConfig, default_hopper_config, hopper_refusal
from tl_backend.configs.regime import Regime
from tl_backend.configs.tile import TileConfig
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem

# Of the two families of prefills; a problem has candidates of one of them on a device.
PrefillConfig = TileConfig | HopperPrefillConfig
Config = PrefillConfig | DecodeChoice
# A config's kind: which kernel it is for.
KINDS = ("prefill", "decode")
FAMILY_DEFAULT = "family default"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Attributes: config: of the launch; source: for people, the table's row that it stands in, or the default."""

    config: Config
    source: str


class Chooser(Protocol):
    """Chooses the configs of one problem on one device."""

    def choose(self, regime: Regime) -> Choice:
        """The config of a launch; its type follows ``regime.kind``."""

    def configs(self, kind: str) -> tuple[Config, ...]:
        """Every config of a kind that ``choose`` can return, without repeats: all of them are compiled at start-up."""

    def drop(self, kind: str, tile: PrefillConfig, reason: str) -> bool:
        """Choose no config with this tile any more; False where the choice is not this chooser's to make."""


def default_config(kind: str, problem: AttentionProblem, device: DeviceSpec) -> Config:
    """The documented default of the family that serves: Hopper's own prefill where it takes the problem.

    Raises:
        UnsupportedError: no tile fits the device's shared memory.
    """
    if kind == "decode":
        return default_decode_choice(problem, device)
    return default_prefill(problem, device)


def default_prefill(problem: AttentionProblem, device: DeviceSpec) -> PrefillConfig:
    """As ``default_config``.

    Raises:
        UnsupportedError: no tile fits the device's shared memory.
    """
    if hopper_refusal(problem, device) is None:
        return default_hopper_config(problem, device)
    return default_prefill_config(problem, device)


class FixedChooser:
    """The same config for every regime: the defaults, or a tuner's candidate in place of one of them."""

    def __init__(
        self,
        problem: AttentionProblem,
        device: DeviceSpec,
        *,
        prefill: PrefillConfig | None = None,
        decode: DecodeChoice | None = None,
        source: str = FAMILY_DEFAULT,
    ) -> None:
        self._problem, self._device, self._source = problem, device, source
        self._given: dict[str, Config | None] = {"prefill": prefill, "decode": decode}

    def choose(self, regime: Regime) -> Choice:
        return Choice(config=self.configs(regime.kind)[0], source=self._source)

    def configs(self, kind: str) -> tuple[Config, ...]:
        return (self._given[kind] or default_config(kind, self._problem, self._device),)

    def drop(self, kind: str, tile: PrefillConfig, reason: str) -> bool:
        del kind, tile, reason
        return False
