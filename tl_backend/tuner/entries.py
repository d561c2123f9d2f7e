"""From what searches found to the entries of a table, and the table that holds them beside older ones."""

from __future__ import annotations

import datetime as dt
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tl_backend import __version__
from tl_backend.configs.identity import DeviceIdentity
from tl_backend.configs.key import ProblemKey
from tl_backend.configs.rows import Measured, Ratio, Row, Settled, stored
from tl_backend.configs.space import tile_of
from tl_backend.configs.table import Provenance, Table, Toolchain
from tl_backend.tuner.found import Found, Outcome
from tl_backend.tuner.halving import DEFAULT
from tl_backend.tuner.select import choose, gains


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Attributes: rows: where something beat the default; settled: where nothing did; open: regimes without either."""

    rows: tuple[Row, ...] = ()
    settled: tuple[Settled, ...] = ()
    open: tuple[str, ...] = ()


def entries_of(outcome: Outcome, environment: Mapping[str, str]) -> Entries:
    """The entries of a searched problem.

    Args:
        environment: as ``measure.results.environment`` has it.
    """
    found = [_entries(outcome, kind, environment) for kind in outcome.kinds.values()]
    return Entries(
        rows=tuple(row for entries in found for row in entries.rows),
        settled=tuple(entry for entries in found for entry in entries.settled),
        open=tuple(regime for entries in found for regime in entries.open),
    )


def _entries(outcome: Outcome, found: Found, environment: Mapping[str, str]) -> Entries:
    key = ProblemKey.of(outcome.problem)
    rows, settled = [], []
    open_regimes = [str(case.regime) for case in found.cases if case not in found.finals]
    for case, index in choose(found.finals, tile_of=lambda index: tile_of(found.candidates[index])).items():
        times = found.finals[case]
        default_us = statistics.median(times[DEFAULT]) * 1e3
        if index != DEFAULT:
            gain = gains(times)[index]
            figures = Measured(
                us=statistics.median(times[index]) * 1e3,
                default_us=default_us,
                times_default=Ratio(median=gain.median, low=gain.low, high=gain.high),
                date=dt.date.fromisoformat(environment["date"]),
                gpu=environment["gpu"],
                driver=environment["driver"],
            )
            config = stored(found.candidates[index])
            rows.append(Row(problem=key, regime=case.regime, config=config, provenance=figures))
        elif found.complete:
            family = stored(found.candidates[DEFAULT]).family
            settled.append(Settled(problem=key, regime=case.regime, us=default_us, family=family))
        else:  # What was not tried could have beaten it.
            open_regimes.append(str(case.regime))
    return Entries(rows=tuple(rows), settled=tuple(settled), open=tuple(open_regimes))


def toolchain_of(environment: Mapping[str, str]) -> Toolchain:
    """The versions of an environment."""
    cuda, hip = (None if environment[name] == "None" else environment[name] for name in ("cuda", "hip"))
    return Toolchain(tilelang=environment["tilelang"], torch=environment["torch"], cuda=cuda, hip=hip)


def table_of(
    entries: Iterable[Entries], device: DeviceIdentity, environment: Mapping[str, str], *, base: Table | None = None
) -> Table:
    """A table of new entries, and of the base's for other problems and regimes.

    Args:
        base: of the same toolchain: a table says one for all its rows.
    """
    entries = list(entries)
    rows = {(row.problem, row.regime): row for found in entries for row in found.rows}
    settled = {(entry.problem, entry.regime): entry for found in entries for entry in found.settled}
    known = rows.keys() | settled.keys()
    for old in base.rows if base else ():
        if (old.problem, old.regime) not in known:
            rows[old.problem, old.regime] = old
    for kept in base.settled if base else ():
        if (kept.problem, kept.regime) not in known:
            settled[kept.problem, kept.regime] = kept
    return Table.make(
        device=device,
        toolchain=toolchain_of(environment),
        provenance=Provenance(
            date=dt.date.fromisoformat(environment["date"]),
            gpu=environment["gpu"],
            driver=environment["driver"],
            tool_version=__version__,
        ),
        rows=tuple(rows[key] for key in sorted(rows, key=_order)),
        settled=tuple(settled[key] for key in sorted(settled, key=_order)),
    )


def _order(key: tuple[ProblemKey, object]) -> tuple[str, str]:
    return str(key[0]), str(key[1])
