"""Rows of results as Markdown.

In: rows in the common form, `{"case", "unit", "ours", "peers": {name: value}, "floor", "error"}`. Out: the lines of a
table; peers are multiples of our time.
"""

from collections.abc import Mapping, Sequence
from math import exp, log
from typing import Any

KINDS: Mapping[str, Sequence[str]] = {
    "linears of 1 and 7 rows": ("linear 1×", "linear 7×"),
    "linears": ("linear",),
    "attention, plain": (", plain",),
    "attention, causal": (", causal",),
    "attention, window of 256": (", window",),
    "attention, padding mask": (", padding",),
    "attention, bias that heads share": (", shared bias",),
    "attention, bias of every head": (", bias",),
    "decoding": ("decode",),
    "products of bytes": ("int8 QDQ",),
    "packed weights": ("weights in blocks",),
    "rows": ("",),
}
OURS = ("ours f32", "ours in float32")  # no peers
Rows = list[dict[str, Any]]


def table(rows: Rows) -> list[str]:
    """A line per row, a column per peer that any of them has."""
    peers = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    unit = rows[0]["unit"]
    lines = [
        f"| case | ours, {unit} | of the floor | {' | '.join(peers)} |",
        "|---|---:|---:" + "|---:" * len(peers) + "|",
    ]
    for row in rows:
        ratios = (f"{row['peers'][name] / row['ours']:.2f}" if name in row["peers"] else "–" for name in peers)
        lines.append(
            f"| {row['case']} | {digits(row['ours'])} | {row['floor'] / row['ours']:.0%} | {' | '.join(ratios)} |"
        )
    return lines


def summary(rows: Rows) -> list[str]:
    """A line per kind: how many cases, the best peer's time over ours, the share of the floor's speed.

    A case belongs to the first kind that fits it.
    """
    lines = ["| kernels | cases | best peer / ours | geometric mean | of the floor |", "|---|---:|---:|---:|---:|"]
    left = rows
    for kind, texts in KINDS.items():
        own = [row for row in left if any(text in row["case"] for text in texts)]
        left = [row for row in left if row not in own]
        if not own:
            continue
        ratios = [min(time for name, time in row["peers"].items() if name not in OURS) / row["ours"] for row in own]
        shares = [row["floor"] / row["ours"] for row in own]
        mean = exp(sum(map(log, ratios)) / len(ratios))
        lines.append(
            f"| {kind} | {len(own)} | {min(ratios):.2f} to {max(ratios):.2f} | {mean:.2f} "
            f"| {min(shares):.0%} to {max(shares):.0%} |"
        )
    return lines


def digits(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
