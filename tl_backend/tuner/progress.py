"""How far a search is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from tl_backend.configs.choice import Config
from tl_backend.configs.decode import DecodeChoice
from tl_backend.configs.prefill_hopper import HopperPrefillConfig
from tl_backend.configs.space import tile_of
from tl_backend.tuner.halving import DEFAULT
from tl_backend.tuner.regimes import Case

LINE_EVERY_S = 5.0


def describe_config(config: Config) -> str:
    """For people: "128x64, 4 heads, 1 stages, 256 threads"; fields that few configs have, by their names."""
    tile = tile_of(config)
    stages = f"{tile.num_stages} stages"
    words = [
        f"{tile.block_m}x{tile.block_n}",
        f"{tile.heads_per_tile} heads",
        f"{stages} and {tile.q_stages} of Q" if isinstance(tile, HopperPrefillConfig) else stages,
        f"{tile.threads} threads",
    ]
    words += [
        f"{field.name} {getattr(tile, field.name)}"
        for field in dataclasses.fields(tile)
        if field.default is not dataclasses.MISSING and getattr(tile, field.name) != field.default
    ]
    if isinstance(config, DecodeChoice):
        words.append(f"{config.blocks_per_multiprocessor} blocks")
    return ", ".join(words)


class Progress:
    """Counts what happens and shows it.

    Args:
        console: where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Bar | None = None
        self._label, self._total, self._best = "", 0, 0.0
        self._counts = {"compiled": 0, "screened": 0, "timed": 0, "refused": 0}
        self._said = 0.0
        self._begun = time.monotonic()

    def begin(self, label: str, *, total: int, known: int) -> None:
        """A problem, its candidates, and how many of them the journal knows."""
        self._label, self._total, self._best = label, total, 0.0
        self._counts = {"compiled": 0, "screened": known, "timed": 0, "refused": 0}
        self.say(f"{label}: {total} candidates" + (f", {known} known from before" if known else ""))
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("{task.fields[details]}"), console=self._console, transient=True,
            )  # fmt: skip
            self._bar.add_task(escape(label), total=total, completed=known, details="")
            self._bar.start()

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(escape(f"[{time.monotonic() - self._begun:6.1f} s] {text}"), soft_wrap=True)

    def compiled(self) -> None:
        """A kernel came out of the pool, or did not."""
        self._counts["compiled"] += 1
        self._show()

    def screened(self, times: Mapping[Case, Mapping[int, float]]) -> None:
        """A candidate passed the gate, and was launched in each case; these are the times of its kind."""
        self._counts["screened"] += 1
        gains = [found[DEFAULT] / min(found.values()) for found in times.values() if DEFAULT in found]
        self._best = max([self._best, *gains])
        self._show()

    def refused(self, kind: str, config: Config, reason: str) -> None:
        """A candidate is out."""
        self._counts["refused"] += 1
        self.say(f"{kind} {describe_config(config)}: {reason}")
        self._show()

    def timed(self) -> None:
        """A stage of a case's finals is over."""
        self._counts["timed"] += 1
        self._show()

    def end(self) -> None:
        """The problem is through."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self.say(f"{self._label}: {self._details()}")

    def _details(self) -> str:
        words = [f"{count} {name}" for name, count in self._counts.items()]
        return ", ".join([*words, f"best so far {self._best:.2f}x"] if self._best else words)

    def _show(self) -> None:
        if self._bar is not None:
            tried = self._counts["screened"] + self._counts["refused"]
            self._bar.update(self._bar.task_ids[0], completed=tried, details=self._details())
        elif time.monotonic() - self._said >= LINE_EVERY_S:
            self._said = time.monotonic()
            self.say(f"{self._label}: {self._details()}")
