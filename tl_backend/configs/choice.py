"""What decides the config of a launch: the interface between tables, the tuner and ``ops``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tl_backend.configs.decode import DecodeChoice, default_decode_choice
from tl_backend.configs.prefill import default_prefill_config
from tl_backend.configs.regime import Regime
from tl_backend.configs.tile import TileConfig
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem

Config = TileConfig | DecodeChoice
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

    def drop(self, kind: str, tile: TileConfig, reason: str) -> bool:
        """Choose no config with this tile any more; False where the choice is not this chooser's to make."""


def default_config(kind: str, problem: AttentionProblem, device: DeviceSpec) -> Config:
    """The family's documented default.

    Raises:
        UnsupportedError: no tile fits the device's shared memory.
    """
    make = default_decode_choice if kind == "decode" else default_prefill_config
    return make(problem, device)


class FixedChooser:
    """The same config for every regime: the defaults, or a tuner's candidate in place of one of them."""

    def __init__(
        self,
        problem: AttentionProblem,
        device: DeviceSpec,
        *,
        prefill: TileConfig | None = None,
        decode: DecodeChoice | None = None,
        source: str = FAMILY_DEFAULT,
    ) -> None:
        self._problem, self._device, self._source = problem, device, source
        self._given: dict[str, Config | None] = {"prefill": prefill, "decode": decode}

    def choose(self, regime: Regime) -> Choice:
        return Choice(config=self.configs(regime.kind)[0], source=self._source)

    def configs(self, kind: str) -> tuple[Config, ...]:
        return (self._given[kind] or default_config(kind, self._problem, self._device),)

    def drop(self, kind: str, tile: TileConfig, reason: str) -> bool:
        del kind, tile, reason
        return False
