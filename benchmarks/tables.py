"""Rows of results as Markdown, and the tables of README.md and docs/ written anew from results/.

In: rows in the common form, `{"case", "unit", "ours", "peers": {name: value}, "floor", "error"}`. Out: the lines of a
table; peers are multiples of our time. `python -m benchmarks.tables` replaces every table that stands behind a comment
such as `<!-- table: summary kernels_zen5 -->`, which names one of `KINDS_OF_TABLE` and files of results/.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "processors.md")
MARKED = re.compile(r"(<!-- table: (\w+)((?: \w+)+) -->\n)((?:\|.*\n)*)")

KINDS: Mapping[str, Sequence[str]] = {
    "linears of 1 and 7 rows": ("linear 1×", "linear 7×"),
    "one row through layers, out of memory": (" linears 1×",),
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
    "plain copies of the rows' bytes": ("copy:",),
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


def models(wide: Rows, narrow: Rows) -> list[str]:
    """Whole models in float32 and, where `narrow` has them, with operands of products in bfloat16."""
    names = ("float32, ms", "ONNX Runtime", "optimizer", "OpenVINO", "of the floor")
    lines = [
        f"| model | {' | '.join(names)} | bfloat16, ms | ONNX Runtime | OpenVINO bf16 | of the floor | error |",
        "|---" + "|---:" * 10 + "|",
    ]
    others = {row["case"]: row for row in narrow}
    for row in wide:
        cells = [*_times(row, "onnxruntime", "onnxruntime optimizer", "openvino")]
        other = others.get(row["case"])
        if other is not None:
            cells += (*_times(other, "onnxruntime", "openvino bf16"), f"{other['error']:.1e}")
        lines.append(f"| {row['case']} | {' | '.join((*cells, *['–'] * (10 - len(cells))))} |")
    return lines


def chosen(cases: Sequence[str], *results: Rows) -> list[str]:
    """Some cases of several results, in milliseconds. KeyError where none of them has a case."""
    lines = [
        "| fp32, 2 threads | TileFuse, ms | ONNX Runtime | its fusions | OpenVINO | of the floor's speed |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    rows = {row["case"]: row for result in results for row in result}
    for case in cases:
        row = rows[case]
        fused = next((name for name in ("onnxruntime optimizer", "onnxruntime fused") if name in row["peers"]), "")
        _, ort, own, openvino, share = _times(row, "onnxruntime", fused, "openvino")
        taken = row["ours"] * {"ms": 1, "µs": 1e-3}[row["unit"]]
        times = (ratio if ratio == "–" else f"{ratio}×" for ratio in (ort, own, openvino))
        lines.append(f"| {case} | {taken:.3g} | {' | '.join(times)} | {share} |")
    return lines


def _times(row: Mapping[str, Any], *peers: str) -> tuple[str, ...]:
    """Our time, that of `peers` over it, and the share of the floor's speed."""
    ratios = (f"{row['peers'][name] / row['ours']:.2f}" if name in row["peers"] else "–" for name in peers)
    return digits(row["ours"]), *ratios, f"{row['floor'] / row['ours']:.0%}"


KINDS_OF_TABLE: Mapping[str, Callable[..., list[str]]] = {"table": table, "summary": summary, "models": models}


def renewed(page: str) -> str:
    """`page` with its marked tables as the results are. A table of `chosen` keeps the cases that it has."""

    def written(match: re.Match[str]) -> str:
        mark, kind, names, old = match.groups()
        results = [json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in names.split()]
        if kind == "chosen":
            lines = chosen([line.split(" | ")[0].removeprefix("| ") for line in old.splitlines()[2:]], *results)
        else:
            lines = KINDS_OF_TABLE[kind](*results)
        return mark + "".join(f"{line}\n" for line in lines)

    return MARKED.sub(written, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a table is not as the results are"
    )
    check = parser.parse_args().check
    for path in PAGES:
        old = path.read_text(encoding="utf-8")
        new = renewed(old)
        if check and new != old:
            sys.exit(f"{path.name}: not as the results are; run `python -m benchmarks.tables`")
        path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
