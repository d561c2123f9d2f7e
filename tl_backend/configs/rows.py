"""What a table holds a row: a problem's class and a regime, the config that serves them, and how that is known."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from tl_backend.configs.choice import Config
from tl_backend.configs.decode import DecodeChoice
from tl_backend.configs.key import ProblemKey
from tl_backend.configs.prefill_hopper import HopperPrefillConfig
from tl_backend.configs.regime import Regime
from tl_backend.configs.tile import TileConfig
from tl_backend.errors import UnsupportedError

# Far above any tile or thread count, far below where arithmetic on them would be slow.
MAX_NUMBER = 2**16
PORTABLE = "portable"
OFF_AT_ZERO = ("num_stages", "narrow_stages", "converter_warps", "rasterisation", "num_split_q")

Figure = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Strict(BaseModel):
    """No conversions, no unknown fields, no changes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def _check_numbers(config: Any) -> Any:
    """Raises ValueError where a number of a config, or of one inside it, counts nothing."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            _check_numbers(value)
        elif isinstance(value, int):
            least = 0 if field.name in OFF_AT_ZERO or isinstance(value, bool) else 1
            if not least <= value <= MAX_NUMBER:
                raise ValueError(f"{field.name} is {value}; {least} to {MAX_NUMBER}")
    return config


class PortablePrefill(Strict):
    """A config of ``kernels/prefill.py``."""

    family: Literal["portable"] = "portable"
    kind: Literal["prefill"] = "prefill"
    values: Annotated[TileConfig, AfterValidator(_check_numbers)]


class PortableDecode(Strict):
    """A config of ``kernels/decode.py``."""

    family: Literal["portable"] = "portable"
    kind: Literal["decode"] = "decode"
    values: Annotated[DecodeChoice, AfterValidator(_check_numbers)]


class HopperPrefill(Strict):
    """A config of ``kernels/prefill_hopper.py``."""

    family: Literal["hopper"] = "hopper"
    kind: Literal["prefill"] = "prefill"
    values: Annotated[HopperPrefillConfig, AfterValidator(_check_numbers)]


class ForeignConfig(BaseModel):
    """A config of a family that another version has. Its row is skipped, its table is not."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    family: str
    kind: str
    values: ClassVar[None] = None


def _tag(config: Any) -> str:
    read = config.get if isinstance(config, dict) else functools.partial(getattr, config)
    names = [read(name, None) for name in ("family", "kind")]
    known = (["portable", "prefill"], ["hopper", "prefill"], ["portable", "decode"])
    return "-".join(names) if names in known else "foreign"


StoredConfig = Annotated[
    Annotated[PortablePrefill, Tag("portable-prefill")]
    | Annotated[HopperPrefill, Tag("hopper-prefill")]
    | Annotated[PortableDecode, Tag("portable-decode")]
    | Annotated[ForeignConfig, Tag("foreign")],
    Discriminator(_tag),
]


def stored(config: Config) -> PortablePrefill | HopperPrefill | PortableDecode:
    """A config as a row holds it."""
    if isinstance(config, DecodeChoice):
        return PortableDecode(values=config)
    return HopperPrefill(values=config) if isinstance(config, HopperPrefillConfig) else PortablePrefill(values=config)


class Ratio(Strict):
    """How many times faster than another: the median of paired ratios, with the 95% interval of that median."""

    median: Figure
    low: Figure
    high: Figure

    @model_validator(mode="after")
    def _is_ordered(self) -> Ratio:
        if not self.low <= self.median <= self.high:
            raise ValueError(f"a median of {self.median} outside its interval, {self.low} to {self.high}")
        return self


class Measured(Strict):
    """Figures of a row, from a device.

    Attributes:
        us: microseconds of a launch with the row's config.
        default_us: with the family's default.
        times_default: how many times faster than the default.
        peer, peer_us: another implementation and its microseconds, where one was there.
        date, gpu, driver: when and where.
    """

    kind: Literal["measured"] = "measured"
    us: Figure
    default_us: Figure
    times_default: Ratio
    peer: str | None = None
    peer_us: Figure | None = None
    date: dt.date
    gpu: str
    driver: str

    @model_validator(mode="after")
    def _names_its_peer(self) -> Measured:
        if (self.peer is None) != (self.peer_us is None):
            raise ValueError(f"peer {self.peer!r} with peer_us {self.peer_us}: one without the other")
        return self


class Modelled(Strict):
    """A row that nobody has measured, and why it is believed."""

    kind: Literal["modelled"] = "modelled"
    reason: Annotated[str, Field(min_length=1)]


class _Keyed(Strict):
    problem: ProblemKey
    regime: Regime

    @model_validator(mode="after")
    def _is_a_class(self) -> _Keyed:
        try:
            problem = self.problem.representative()
        except UnsupportedError:  # Of another version, perhaps: the look-up skips the row.
            return self
        if ProblemKey.of(problem) != self.problem:
            raise ValueError(f"{self.problem} is the class of no problem; {ProblemKey.of(problem)} is")
        return self


class Row(_Keyed):
    """The config of one class of problems in one regime."""

    config: StoredConfig
    provenance: Annotated[Measured | Modelled, Discriminator("kind")]


class Settled(_Keyed):
    """A class and a regime that were searched, where nothing beat the family's default by more than the noise.

    Attributes:
        us: microseconds of the default.
        family: whose default it was. Entries from before there were two say nothing: it was the portable one's.
    """

    us: Figure
    family: str = PORTABLE
