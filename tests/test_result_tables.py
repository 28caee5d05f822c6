"""The tables of README.md and docs/processors.md are those of benchmarks/results/."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import tables


def row(case: str, ours: float, **peers: float) -> dict[str, object]:
    return {"case": case, "unit": "µs", "ours": ours, "peers": peers, "floor": ours / 2, "error": 1e-3}


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_pages_are_as_the_results_are(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.renewed(text) == text, "run `python -m benchmarks.tables`"


def test_marked_tables_follow_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("linear 1×8", 10.0, onnxruntime=20.0, openvino=15.0), row("softmax", 4.0, onnxruntime=10.0)]
    (tmp_path / "some.json").write_text(json.dumps(rows), encoding="utf-8")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = "Before.\n\n<!-- table: KIND some -->\n| case |\n|---|\n| softmax | old |\n\nAfter.\n| not | marked |\n"
    for kind, want in {
        "table": "| softmax | 4 | 50% | 2.50 | – |",
        "summary": "| rows | 1 | 2.50 to 2.50 | 2.50 | 50% to 50% |",
        "chosen": "| softmax | 0.004 | 2.50× | – | – | 50% |",
    }.items():
        got = tables.renewed(page.replace("KIND", kind))
        assert want in got
        assert "old" not in got
        assert got.endswith("\n\nAfter.\n| not | marked |\n")
        assert ("linear 1×8" in got) == (kind == "table")
    with pytest.raises(KeyError, match="gone"):
        tables.renewed(page.replace("KIND", "chosen").replace("softmax", "gone"))
