"""The look-up of configs: a user's active table, then the shipped one, then the family default.

A key is met exactly or missed: no row serves another class or regime than its own. Nothing here ends a server: what
cannot be used costs a log line and a count.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path

from tl_backend.configs.choice import FAMILY_DEFAULT, Choice, Config, PrefillConfig, default_config
from tl_backend.configs.generations import read_active, read_shipped
from tl_backend.configs.identity import device_identity
from tl_backend.configs.key import ProblemKey
from tl_backend.configs.regime import Regime
from tl_backend.configs.rows import Row, Settled, stored
from tl_backend.configs.space import tile_of, verdict
from tl_backend.configs.table import Table
from tl_backend.configs.words import format_problem
from tl_backend.device import DeviceSpec
from tl_backend.errors import TableError, TLBackendError
from tl_backend.problem import AttentionProblem

# What is counted, each with a text that says which.
MISSES, BAD_TABLES, SKIPPED_ROWS = "misses", "bad_tables", "skipped_rows"
Count = Callable[[str, str], None]

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM formats and shows only loggers below its own.


def _uncounted(event: str, what: str) -> None:
    """Where nobody counts."""


class Tables:
    """The tables of one device, as they were when they were loaded.

    Args:
        device: whose launches they serve.
        tables: the first one that has an entry decides.
        bad_files: why files that should be among them are not.
        count: called with ``MISSES`` at each miss, and with the other events here.

    Attributes:
        skipped: entries that serve no launch here, each with its table and the reason.
    """

    def __init__(
        self,
        device: DeviceSpec,
        tables: tuple[Table, ...],
        *,
        bad_files: tuple[str, ...] = (),
        count: Count = _uncounted,
    ) -> None:
        self.device, self.identity, self.count = device, device_identity(device), count
        self.tables, self.bad_files = tables, bad_files
        self.skipped: dict[tuple[ProblemKey, Regime], str] = {}
        # None as a config: the default was found to be the best.
        self.entries: dict[ProblemKey, dict[Regime, tuple[Config | None, str]]] = {}
        for table in tables:
            self._add(table)
        self._choosers: dict[AttentionProblem, TableChooser] = {}
        self._said: set[tuple[ProblemKey, Regime | None]] = set()
        self._say_what_was_loaded()

    @classmethod
    def load(cls, device: DeviceSpec, user_folder: Path | None, *, count: Count = _uncounted) -> Tables:
        """Read a device's tables: the active generation in the user's folder, and the shipped one.

        Args:
            device: whose tables.
            user_folder: with a folder a device; None for none.
            count: see the class.
        """
        identity, bad = device_identity(device), []

        def read(reader: Callable[[], Table | None]) -> list[Table]:
            try:
                table = reader()
            except TableError as error:
                bad.append(str(error))
                return []
            return [] if table is None else [table]

        users = [] if user_folder is None else read(lambda: read_active(user_folder, identity))
        shipped = read(lambda: read_shipped(identity))
        return cls(device, (*users, *shipped), bad_files=tuple(bad), count=count)

    def chooser(self, problem: AttentionProblem) -> TableChooser:
        """The chooser of a problem, one for all who ask."""
        chooser = self._choosers.get(problem)
        if chooser is None:
            chooser = self._choosers[problem] = TableChooser(problem, self)
        return chooser

    def say_miss(self, problem: AttentionProblem, key: ProblemKey, regime: Regime) -> None:
        """Log a miss: once a class and regime, and once a class of which there is no row at all.

        Where no row of any problem is usable, that was said when the tables were loaded.
        """
        said = (key, regime if key in self.entries or (key, regime) in self.skipped else None)
        if not self.entries or said in self._said:
            return
        self._said.add(said)
        if (key, regime) in self.skipped:
            reason = self.skipped[key, regime]
        else:
            names = " and ".join(table.label for table in self.tables)
            reason = f"{names}: no row of {key}" + ("" if said[1] is None else f" in this regime: {regime}")
        logger.warning(
            "TileLang attention takes the family default: %s. `tl-backend tune --problem %s` would tune it.",
            reason,
            format_problem(problem),
        )

    def _add(self, table: Table) -> None:
        for number, row in enumerate(table.rows, start=1):
            name = f"{table.label} row {number}"
            reason = row_refusal(row, self.device)
            if reason is not None:
                self._skip(row, f"{name}: {reason}")
            else:
                self.entries.setdefault(row.problem, {}).setdefault(row.regime, (row.config.values, name))
        for entry in table.settled:
            if (reason := settled_refusal(entry, self.device)) is not None:
                self._skip(entry, f"{table.label}: {reason}")
                continue
            source = f"{FAMILY_DEFAULT}, the best that {table.label} found"
            self.entries.setdefault(entry.problem, {}).setdefault(entry.regime, (None, source))

    def _skip(self, entry: Row | Settled, reason: str) -> None:
        self.skipped.setdefault((entry.problem, entry.regime), reason)
        self.count(SKIPPED_ROWS, reason)

    def _say_what_was_loaded(self) -> None:
        for message in self.bad_files:
            self.count(BAD_TABLES, message)
            logger.warning("TileLang attention goes on without it: %s", message)
        if self.skipped:
            first, more = next(iter(self.skipped.values())), len(self.skipped) - 1
            logger.warning("TileLang attention skips rows: %s%s", first, f" (and {more} more)" if more else "")
        if self.tables:
            logger.info("TileLang attention has %s", " and ".join(table.label for table in self.tables))
        elif not self.bad_files:
            logger.log(
                logging.WARNING if self.device.is_gpu else logging.INFO,
                "TileLang attention has no table of %s, driver's name %r: every launch takes the family default. "
                "`tl-backend tune` writes one.",
                self.identity,
                self.device.name,
            )


class TableChooser:
    """A ``Chooser`` of one problem, from a device's tables."""

    def __init__(self, problem: AttentionProblem, tables: Tables) -> None:
        self._problem, self._tables, self._key = problem, tables, ProblemKey.of(problem)
        self._entries = dict(tables.entries.get(self._key, {}))
        self._found: dict[Regime, tuple[Choice, str | None]] = {}  # With what is counted at a miss.
        self._dropped: set[tuple[str, PrefillConfig]] = set()
        self._default = functools.cache(lambda kind: default_config(kind, problem, tables.device))

    def choose(self, regime: Regime) -> Choice:
        """The row of exactly this regime, else the default. Runs at every step: it looks up what it found before."""
        found = self._found.get(regime)
        if found is None:
            found = self._found[regime] = self._find(regime)
        choice, missed = found
        if missed is not None:
            self._tables.count(MISSES, missed)
        return choice

    def configs(self, kind: str) -> tuple[Config, ...]:
        """The default, then the others of this problem's rows."""
        rows = (config for regime, (config, _) in self._entries.items() if regime.kind == kind and config is not None)
        return tuple(dict.fromkeys([self._default(kind), *rows]))

    def drop(self, kind: str, tile: PrefillConfig, reason: str) -> bool:
        """Take the default where a row has this tile, whose kernel cannot be had here."""
        rows = {
            regime: source
            for regime, (config, source) in self._entries.items()
            if regime.kind == kind and config is not None and tile_of(config) == tile
        }
        if (kind, tile) in self._dropped:  # A decode's tile is two kernels.
            return True
        if tile == tile_of(self._default(kind)) or not rows:
            return False
        self._dropped.add((kind, tile))
        for regime, source in rows.items():
            self._entries[regime] = (None, f"{FAMILY_DEFAULT}, since {source} does not compile")
            self._tables.count(SKIPPED_ROWS, f"{source}: {reason}")
        logger.warning(
            "TileLang attention skips rows: %s (and %d more): %s", next(iter(rows.values())), len(rows) - 1, reason
        )
        self._found.clear()
        return True

    def _find(self, regime: Regime) -> tuple[Choice, str | None]:
        default = self._default(regime.kind)
        if regime in self._entries:
            config, source = self._entries[regime]
            return Choice(config=config or default, source=source), None
        self._tables.say_miss(self._problem, self._key, regime)
        return Choice(config=default, source=FAMILY_DEFAULT), f"{self._key}: {regime}"


def row_refusal(row: Row, device: DeviceSpec) -> str | None:
    """Why this device, or this version, cannot run a row; or None."""
    config = row.config.values
    if config is None:
        return f"kernel family {row.config.family!r} ({row.config.kind!r}) is not known here"
    if row.config.kind != row.regime.kind:
        return f"a config of the {row.config.kind} for {row.regime.phase}"
    try:
        problem = row.problem.representative()
        if config == default_config(row.config.kind, problem, device):
            return None
        # What is not worth compiling may also be what does not compile, or writes past its tile.
        found = verdict(row.config.kind, config, problem, device)
    except TLBackendError as error:
        return str(error)
    return None if found is None else f"{found[1]} (rule: {found[0]})"


def settled_refusal(entry: Settled, device: DeviceSpec) -> str | None:
    """Why what a search settled says nothing about launches here, or None: it was about another family's default."""
    try:
        default = default_config(entry.regime.kind, entry.problem.representative(), device)
    except TLBackendError as error:
        return str(error)
    family = stored(default).family
    if family == entry.family:
        return None
    return f"the {entry.family} family's default was the best for {entry.regime}; the {family} family's serves now"
