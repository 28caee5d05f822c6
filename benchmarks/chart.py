"""Draws rows of benchmarks in the common form: how many times faster than each peer. Needs matplotlib."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """How many times faster than each peer, a row per case and a mark per peer."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    pyplot.rcParams["svg.fonttype"] = "none"  # text as text
    figure, chart = pyplot.subplots(figsize=(9, 1 + 0.17 * len(rows)))
    for peer in dict.fromkeys(name for row in rows for name in row["peers"]):
        found = [(row["peers"][peer] / row["ours"], at) for at, row in enumerate(rows) if peer in row["peers"]]
        chart.plot(*zip(*found, strict=True), "o", markersize=4, label=peer)
    chart.axvline(1.0, color="black", linewidth=0.8)
    chart.set_xscale("log", subs=(1.5, 2, 3, 4, 5, 6, 8))
    for axis_format in (chart.xaxis.set_major_formatter, chart.xaxis.set_minor_formatter):
        axis_format("{x:g}")
    chart.set_yticks(range(len(rows)), [row["case"] for row in rows], fontsize=6)
    chart.margins(y=0.01)
    chart.invert_yaxis()
    chart.set_xlabel("time of the peer / ours")
    chart.legend(fontsize=7)
    chart.grid(axis="x", which="both", linewidth=0.3)
    figure.tight_layout()
    figure.savefig(path)
