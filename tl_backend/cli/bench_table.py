"""What a benchmark found, as a table on the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from tl_backend.cli.output import people

TILELANG = "tilelang"


def title(results: dict[str, Any]) -> str:
    """The case in one line."""
    p, is_decode = results["problem"], results["kind"] == "decode"
    heads = (
        f"H{p['num_q_heads']}" if p["num_q_heads"] == p["num_kv_heads"] else f"H{p['num_q_heads']}/{p['num_kv_heads']}"
    )
    words = [f"B{results['batch']} {heads} D{p['head_dim']}", p["dtype"], "causal" if p["causal"] else "full"]
    if p["kv_dtype"] != p["dtype"]:
        words.append(f"cache {p['kv_dtype']}")
    words.append("contiguous" if p["page_size"] is None else f"page {p['page_size']}")
    return f"{'Decode' if is_decode else 'Attention'}, {', '.join(words)}"


def peers_of(results: dict[str, Any]) -> list[str]:
    """The peers that were timed in any row, in their order."""
    return list(dict.fromkeys(name for row in results["rows"] for name in row["times"]))


def figure_of(rate: float) -> str:
    """Three digits, or all before the point."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def show(results: dict[str, Any]) -> None:
    """Print the table, the roofline and who is not there."""
    is_decode, peers = results["kind"] == "decode", peers_of(results)
    table = Table()
    for heading in ("keys", "us", "TB/s" if is_decode else "TFLOP/s", "of\nroof", *(_heading(name) for name in peers)):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in results["rows"]:
        own = row["kernels"].get(TILELANG)
        if own is None:
            table.add_row(row["name"], "-", "-", "-", *["-" for _ in peers])
            continue
        rate = figure_of(own["tbps" if is_decode else "tflops"])
        table.add_row(
            row["name"],
            f"{own['us']:.0f}" if own["us"] >= 1000 else f"{own['us']:.1f}",
            rate,
            f"{own['of_roofline']:.0%}",
            *(_times(row["times"].get(name)) for name in peers),
        )
    console, ceilings = people(), results["ceilings"]
    console.print(title(results), style="bold", markup=False)  # A title of the table's would be cut to its width.
    console.print(table)
    console.print(_environment(results["environment"]), markup=False)
    for name, unit in (("matmul", "TFLOP/s"), ("copy", "TB/s")):
        rates = ", ".join(f"{program} {figure_of(rate)}" for program, rate in ceilings[name].items())
        console.print(f"roofline, {name}: {rates} {unit}; the higher is the roof", markup=False)
    for remark in dict.fromkeys(_remarks(results)):
        console.print(remark, markup=False)


def _heading(peer: str) -> str:
    """In two lines, so that five peers fit into 100 columns."""
    return f"x {peer}".replace("-", "\n")


def _times(ratio: dict[str, float] | None) -> str:
    """A ratio with half of its 95% interval."""
    return "-" if ratio is None else f"{ratio['median']:.2f} ±{(ratio['high'] - ratio['low']) / 2:.2f}"


def _environment(facts: dict[str, str]) -> str:
    where = "CPU" if facts["gpu"] == "none" else f"{facts['gpu']}, driver {facts['driver']}"
    return f"{where}; TileLang {facts['tilelang']}, torch {facts['torch']}, {facts['date']}"


def _remarks(results: dict[str, Any]) -> list[str]:
    rows = results["rows"]
    remarks = [f"wrong at {row['name']} keys: {row['problems']}" for row in rows if row["problems"] is not None]
    remarks += [f"config: {row['source']}" for row in rows if row["source"]]
    unsettled = [row["name"] for row in rows if row["times"] and not row["is_settled"]]
    if unsettled:
        remarks.append(f"intervals wider than 2% after all rounds, at keys: {', '.join(unsettled)}")
    remarks += [f"not there: {name}: {reason}" for row in rows for name, reason in row["absent"].items()]
    return remarks + [f"ceiling without {name}: {reason}" for name, reason in results["ceilings"]["errors"].items()]
