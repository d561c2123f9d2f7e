"""The rows of ``benchmarks.prefill`` as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.prefill_goals import EACH, peer_ratio

# Colour-blind safe (Okabe and Ito, "Color Universal Design"), by page size.
COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7")
BAR = 0.8  # Of the height of a row, what its bars take.


def draw(document: dict[str, Any], path: Path) -> None:
    """A bar a row and page: how many times faster than the peer, with its interval, and a line at 1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [(row, *found) for row in document["rows"] if (found := peer_ratio(row)) is not None]
    names = list(dict.fromkeys(row["name"] for row in document["rows"]))
    pages = sorted({row["problem"]["page_size"] for row in document["rows"]})
    figure = Figure(figsize=(9, 1.6 + 0.42 * len(names)), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    height = BAR / len(pages)
    for index, page in enumerate(pages):
        bars = [(row, ratio) for row, _, ratio in rows if row["problem"]["page_size"] == page]
        middle = [names.index(row["name"]) + (index + 0.5) * height - BAR / 2 for row, _ in bars]
        median = [ratio["median"] for _, ratio in bars]
        spread = [[r["median"] - r["low"] for _, r in bars], [r["high"] - r["median"] for _, r in bars]]
        axes.barh(
            middle, median, 0.9 * height, xerr=spread, label=f"page {page}", color=COLOURS[index % len(COLOURS)],
            error_kw={"linewidth": 1, "ecolor": "#333333"},
        )  # fmt: skip
    peers = {row["name"]: peer for row, peer, _ in rows}
    axes.set_yticks(
        range(len(names)), [name + ("" if EACH[peers.get(name, "fa3")] == 1 else " (Triton)") for name in names]
    )
    axes.invert_yaxis()
    axes.axvline(1.0, color="#333333", linestyle="--", linewidth=1.2)
    axes.set_xlabel("times as fast as FlashAttention-3 in vLLM, which took turns on the same tensors")
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    facts = document["environment"]
    axes.set_title(
        f"Paged prefill, {facts['gpu']}, TileLang {facts['tilelang']}, torch {facts['torch']}, {facts['date']}",
        loc="left", fontsize=11, pad=26,
    )  # fmt: skip
    axes.margins(y=0.01)
    axes.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(pages))
    figure.savefig(path, format="png")
