"""Tables of devices that nobody could measure, from the table of one that was measured."""

from __future__ import annotations

import datetime as dt

from tl_backend._version import __version__
from tl_backend.configs.choice import default_config
from tl_backend.configs.identity import DeviceIdentity, spec_of
from tl_backend.configs.lookup import row_refusal
from tl_backend.configs.rows import Measured, Modelled, Row
from tl_backend.configs.rules import WGMMA_ROWS
from tl_backend.configs.space import tile_of
from tl_backend.configs.table import Provenance, Table
from tl_backend.configs.tile import TileConfig
from tl_backend.device import DeviceSpec
from tl_backend.errors import TLBackendError, UnsupportedError, describe


def carried(source: Table, device: DeviceIdentity) -> Table:
    """The measured rows of a table that are believed to be best on another device, too.

    A row is carried where the kernel's machine code would be alike, and the device can run it: on the same architecture
    with as many multiprocessors every row; on another architecture of the vendor those that use no instruction which
    one of the two lacks. Rows that are the other device's default anyway are left out, and so is what was settled: that
    the default is the best is a finding about the device that it was found on.

    Raises:
        UnsupportedError: nothing can be carried.
    """
    here, there = spec_of(source.device), spec_of(device)
    rows = []
    for row in source.rows:
        reason = _reason(row, source, here, there)
        if reason is not None and row_refusal(row, there) is None and not _is_default(row, there):
            rows.append(row.model_copy(update={"provenance": Modelled(reason=reason)}))
    if not rows:
        raise UnsupportedError(
            describe(
                f"table of {device.name}",
                value=f"none of the {len(source.rows)} rows of {source.label}",
                limit="a row is carried where its machine code would be alike",
                remedy=f"Run `tl-backend tune` on a {device.name}.",
            )
        )
    provenance = Provenance(
        date=dt.datetime.now(dt.timezone.utc).date(),
        gpu=f"none: carried from {source.label}",
        driver=source.provenance.driver,
        tool_version=__version__,
        commit=source.provenance.commit,
    )
    return Table.make(device=device, toolchain=source.toolchain, provenance=provenance, rows=tuple(rows))


def _reason(row: Row, source: Table, here: DeviceSpec, there: DeviceSpec) -> str | None:
    """Why a row is believed on another device, or None."""
    config = row.config.values
    if config is None or not isinstance(row.provenance, Measured) or here.vendor != there.vendor:
        return None
    name = source.device.name
    if here.arch == there.arch and here.multiprocessors == there.multiprocessors:
        return f"measured on {name}: the same {here.arch} with {here.multiprocessors} multiprocessors, other memory"
    try:
        problem = row.problem.representative()
    except TLBackendError:
        return None
    tile = tile_of(config)
    is_plain = isinstance(tile, TileConfig) and tile.block_m < WGMMA_ROWS and not tile.copies_whole_tiles(problem)
    if here.vendor == "nvidia" and is_plain:
        return f"measured on {name}, where this tile runs on mma.sync and cp.async as well: it has no wgmma and no TMA"
    return None


def _is_default(row: Row, device: DeviceSpec) -> bool:
    config = row.config.values
    return config == default_config(row.regime.kind, row.problem.representative(), device)
