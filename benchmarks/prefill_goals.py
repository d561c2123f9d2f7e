"""What the rows of ``benchmarks.prefill`` have to reach, and which do not. Reads results in terms of JSON."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.prefill_cases import FA3, TRITON

TILELANG = "tilelang"
# How many times faster than its peer each row is, and the geomean of those beside FA3.
EACH = {FA3: 1.0, TRITON: 1.5}
GEOMEAN = 1.12
# A small page costs so much at most, in parts of the time with the large one.
SMALL_PAGE, LARGE_PAGE, PAGE_COST = 16, 128, 0.05
# Of the matmul rate that was measured in the same process; and the best that is published.
SHARE, BEST_SHARE = 0.80, 0.88
SHARE_ROWS = ("B1 S8192", "B1 S32768")
MATMUL, OTHER_PAGE = "matmul", f"page {LARGE_PAGE}"
# A step's plan serves so many layers.
LAYERS = 32

Row = dict[str, Any]


def label(row: Row) -> str:
    """A row in words."""
    return f"{row['name']}, page {row['problem']['page_size']}"


def peer_ratio(row: Row) -> tuple[str, dict[str, float]] | None:
    """The peer of a row and the ratio to it, if there is one."""
    return next(((name, row["times"][name]) for name in EACH if name in row["times"]), None)


def with_host(row: Row, peer: str) -> float | None:
    """The ratio if a step's preparation cost each layer its part of the host's time, too."""
    if TILELANG not in row["step"] or TILELANG not in row["kernels"]:
        return None
    us = {
        name: row["kernels"][name]["us"] + row["step"].get(name, {"host_us": 0.0})["host_us"] / LAYERS
        for name in (TILELANG, peer)
    }
    return float(us[peer] / us[TILELANG])


def failures(document: dict[str, Any]) -> list[str]:
    """Rows without a figure, and why."""
    found = []
    for row in document["rows"]:
        if row["problems"] is not None:
            found.append(f"{label(row)}: {row['problems']}")
        elif peer_ratio(row) is None:
            found.append(f"{label(row)}: no peer: {'; '.join(row['absent'].values())}")
    return found


def misses(document: dict[str, Any]) -> list[str]:
    """Goals that are not met, and by how much. A row misses where its interval's upper end does."""
    found, ratios = [], []
    for row in document["rows"]:
        if (measured := peer_ratio(row)) is None:
            continue
        peer, ratio = measured
        if peer == FA3:
            ratios.append(ratio["median"])
        if ratio["high"] < EACH[peer]:
            found.append(f"{label(row)}: {_interval(ratio)} x {peer}, {_short(ratio['median'], EACH[peer])}")
        if (other := row["beside"].get(OTHER_PAGE)) is not None and other["high"] < 1 / (1 + PAGE_COST):
            found.append(
                f"{label(row)}: {1 / other['median']:.3f} times as long as with page {LARGE_PAGE}; "
                f"at most {1 + PAGE_COST:.2f} is the goal"
            )
    if ratios and (mean := statistics.geometric_mean(ratios)) < GEOMEAN:
        found.append(f"geomean of {len(ratios)} rows: {mean:.3f} x {FA3}, {_short(mean, GEOMEAN)}")
    for name, page, share, _ in shares(document):
        if share < SHARE:
            found.append(f"{name}, page {page}: {share:.3f} of the matmul rate, {_short(share, SHARE)}")
    return found


def shares(document: dict[str, Any]) -> list[tuple[str, int, float, float | None]]:
    """Of each row that has it: name, page, share of the ceiling's matmul rate, share of a matmul's that took turns."""
    found = []
    for row in document["rows"]:
        page = row["problem"]["page_size"]
        if row["name"] not in SHARE_ROWS or page != LARGE_PAGE or TILELANG not in row["kernels"]:
            continue
        beside = row["beside"].get(MATMUL)
        paired = None if beside is None else beside["median"] * row["flops"] / document["matmul_flops"]
        found.append(
            (row["name"], page, row["kernels"][TILELANG]["tflops"] / document["ceilings"]["matmul_tflops"], paired)
        )
    return found


def summary(document: dict[str, Any]) -> str:
    """What there is to say of all rows."""
    lines, rows = [], document["rows"]
    measured = [(row, *found) for row in rows if (found := peer_ratio(row)) is not None]
    pages = sorted({row["problem"]["page_size"] for row in rows})
    for title, chosen in (("all pages", pages), *((f"page {page}", [page]) for page in pages)):
        ratios = [
            ratio["median"] for row, peer, ratio in measured if peer == FA3 and row["problem"]["page_size"] in chosen
        ]
        if ratios:
            lines.append(
                f"{title:10} geomean {statistics.geometric_mean(ratios):.3f} x {FA3}, "
                f"{min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} rows"
            )
    for name, page, share, paired in shares(document):
        turns = "" if paired is None else f", {paired:.3f} of torch's that took turns"
        lines.append(
            f"{name}, page {page}: {share:.3f} of the matmul rate{turns}; {BEST_SHARE - share:+.3f} to {BEST_SHARE}"
        )
    unsettled = [label(row) for row, _, _ in measured if not row["is_settled"]]
    for title, told in (
        ("failed", failures(document)),
        ("missed", misses(document)),
        ("interval wider than 2%", unsettled),
    ):
        lines.append(f"{title}: {len(told) or 'none'}")
        lines += [f"  {line}" for line in told]
    return "\n".join(lines)


def _interval(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def _short(value: float, goal: float) -> str:
    return f"{1 - value / goal:.1%} short of {goal:.2f}"
