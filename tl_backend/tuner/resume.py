"""What a table has of a list already: a search goes on from it on another day, and on another machine of its kind.

A journal holds more, but is of one machine; the table is what travels.
"""

from __future__ import annotations

from tl_backend.configs.choice import Config
from tl_backend.configs.key import ProblemKey
from tl_backend.configs.lookup import row_refusal, settled_refusal
from tl_backend.configs.regime import Regime
from tl_backend.configs.rows import Measured
from tl_backend.configs.table import Table
from tl_backend.device import DeviceSpec
from tl_backend.problem import AttentionProblem
from tl_backend.tuner.anchors import class_of, shape


def usable(table: Table, device: DeviceSpec) -> tuple[Table, tuple[str, ...]]:
    """A table without the entries that would serve no launch on its device, and why each of those would not.

    What another version's kernel family may still serve stays.
    """
    refusals = [None if row.config.values is None else row_refusal(row, device) for row in table.rows]
    stale = [settled_refusal(entry, device) for entry in table.settled]
    kept = {
        "rows": tuple(row for row, reason in zip(table.rows, refusals, strict=True) if reason is None),
        "settled": tuple(entry for entry, reason in zip(table.settled, stale, strict=True) if reason is None),
    }
    return table.model_copy(update=kept), tuple(reason for reason in (*refusals, *stale) if reason is not None)


def known_regimes(table: Table | None, problem: AttentionProblem) -> frozenset[Regime]:
    """Where a problem has an entry that was measured."""
    if table is None:
        return frozenset()
    key = ProblemKey.of(problem)
    rows = (row.regime for row in table.rows if row.problem == key and isinstance(row.provenance, Measured))
    return frozenset((*rows, *(entry.regime for entry in table.settled if entry.problem == key)))


def known_finalists(table: Table | None) -> dict[ProblemKey, dict[str, tuple[Config, ...]]]:
    """The configs that were best somewhere, by kind, of each class of problems: its others need not try the space."""
    found: dict[ProblemKey, dict[str, dict[Config, Config]]] = {}
    for row in table.rows if table is not None else ():
        if row.config.values is not None and isinstance(row.provenance, Measured):
            of_kind = found.setdefault(class_of(row.problem), {}).setdefault(row.regime.kind, {})
            of_kind.setdefault(shape(row.config.values), row.config.values)
    return {key: {kind: tuple(configs.values()) for kind, configs in kinds.items()} for key, kinds in found.items()}
