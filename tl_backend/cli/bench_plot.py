"""What a benchmark found, as a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from tl_backend.cli.bench_table import TILELANG, figure_of, peers_of, title
from tl_backend.errors import EnvironmentProblemError, InvalidInputError, describe

# Colour-blind safe (Okabe and Ito, "Color Universal Design"), and ours the strongest.
OURS = "#D55E00"
OTHERS = {
    "sdpa-flash": "#0072B2",
    "sdpa-cudnn": "#56B4E9",
    "sdpa-efficient": "#009E73",
    "triton": "#CC79A7",
    "fa3": "#222222",
    "aiter": "#E69F00",
}
NAMES = {
    TILELANG: "TileLang (this package)",
    "sdpa-flash": "torch SDPA, flash",
    "sdpa-cudnn": "torch SDPA, cuDNN",
    "sdpa-efficient": "torch SDPA, memory-efficient",
    "triton": "vLLM Triton",
    "fa3": "FlashAttention-3",
    "aiter": "AITER",
}


def check_can_draw() -> None:
    """Before anything is measured.

    Raises:
        EnvironmentProblemError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        remedy = "Run pip install 'tl-backend[plot]'."
        raise EnvironmentProblemError(
            describe("--plot", value="no matplotlib", limit="it draws the plot", remedy=remedy)
        )


def draw(results: dict[str, Any], path: Path) -> None:
    """A line a kernel over the keys of a sequence, and the roofline dashed.

    Raises:
        InvalidInputError: no row has a time.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = sorted((row for row in results["rows"] if row["kernels"]), key=lambda row: row["seq_lens"][0])
    if not rows:
        raise InvalidInputError(
            describe("--plot", value="no row with a time", limit="one is needed", remedy="See what the rows say.")
        )
    figure = Figure(figsize=(9, 5.4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    unit = _lines(axes, results, rows)
    _decorate(axes, results, rows, unit)
    figure.savefig(path, format="png")


def _lines(axes: Any, results: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Draw the kernels and the roofline; the unit of the figures."""
    is_decode = results["kind"] == "decode"
    field, unit = ("tbps", "TB/s") if is_decode else ("tflops", "TFLOP/s")
    peers = [name for name in NAMES if name in peers_of(results)]
    for name in [*peers, TILELANG]:
        points = [(row["seq_lens"][0], row["kernels"][name][field]) for row in rows if name in row["kernels"]]
        ours = name == TILELANG
        axes.plot(
            *zip(*points, strict=True),
            label=NAMES[name],
            color=OURS if ours else OTHERS[name],
            linewidth=2.6 if ours else 1.6,
            marker="o" if ours else "s",
            markersize=6 if ours else 4,
            zorder=3 if ours else 2,
        )
        if ours:
            _label(axes, points)
    ceiling = results["ceilings"]["copy_tbps" if is_decode else "matmul_tflops"]
    axes.axhline(ceiling, color="#333333", linestyle="--", linewidth=1.2, zorder=1)
    what = "device copy" if is_decode else f"{results['ceilings']['dtype']} matmul"
    axes.annotate(
        f"roofline: {what} measured here, {figure_of(ceiling)} {unit}",
        (0.01, ceiling), xycoords=("axes fraction", "data"), xytext=(0, 4), textcoords="offset points",
        color="#333333", fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )  # fmt: skip
    top = max([ceiling, *(kernel[field] for row in rows for kernel in row["kernels"].values())])
    axes.set_ylim(0, 1.14 * top)
    return unit


def _label(axes: Any, points: list[tuple[int, float]]) -> None:
    """Our figures over their points; the first one on its left, where no line is."""
    from matplotlib.patheffects import withStroke

    for index, (x, y) in enumerate(points):
        axes.annotate(
            figure_of(y), (x, y), textcoords="offset points", xytext=(0, 9) if index else (-9, -3),
            ha="center" if index else "right", color=OURS, fontsize=9, fontweight="bold", zorder=4,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )  # fmt: skip


def _decorate(axes: Any, results: dict[str, Any], rows: list[dict[str, Any]], unit: str) -> None:
    lengths = sorted({row["seq_lens"][0] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
    axes.minorticks_off()
    axes.margins(x=0.09)
    axes.set_xlabel("keys of a sequence" if results["kind"] == "decode" else "sequence length")
    axes.set_ylabel(unit)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    facts = results["environment"]
    where = "CPU" if facts["gpu"] == "none" else facts["gpu"]
    axes.set_title(title(results), loc="left", fontsize=13, fontweight="bold", pad=24)
    axes.text(
        0, 1.025, f"{where}, TileLang {facts['tilelang']}, torch {facts['torch']}, {facts['date']}; higher is better",
        transform=axes.transAxes, color="#555555", fontsize=9,
    )  # fmt: skip
    lines = sorted(axes.get_legend_handles_labels()[0], key=lambda line: -line.get_ydata()[-1])
    axes.legend(  # In the order of the lines' right ends.
        lines, [line.get_label() for line in lines],
        loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9,
    )  # fmt: skip
