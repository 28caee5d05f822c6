"""The kernels that docs/language.md shows, taken from the page and run."""

import linecache
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilecore
from tilecore import language

pytestmark = pytest.mark.cpu
PAGE = Path(__file__).resolve().parents[2] / "docs" / "language.md"


def shown(start: str) -> str:
    """The code block that has `start`."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return next(block for block in blocks if start in block)


def run(source: str, name: str, **names: Any) -> dict[str, Any]:
    """The names that a block defines; its lines are known to Python, as those of a file are."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), names)
    return names


def test_the_first_kernel() -> None:
    matmul = run(shown("def matmul"), "language.md:matmul")["matmul"]
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((33, 70)).astype(np.float32), rng.standard_normal((70, 50)).astype(np.float32)
    np.testing.assert_allclose(matmul(a, b), a.astype(np.float64) @ b.astype(np.float64), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_under_70_lines(causal: bool) -> None:
    source = shown("def attention").rsplit("\n\n", 1)[0]
    assert len(source.splitlines()) < 70
    names = run("import tilecore\nimport tilecore.language as T\n" + source, "language.md:attention")
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 3, 37, 16)).astype(np.float32)
    k, v = (rng.standard_normal((2, 3, 90, 16)).astype(np.float32) for _ in range(2))
    found = names["attention"](2, 3, 16, causal=causal)(q, k, v)
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3) / 4
    if causal:
        scores = np.where(np.arange(90) <= np.arange(37)[:, None] + 53, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(
        found, weights / weights.sum(-1, keepdims=True) @ v.astype(np.float64), rtol=1e-4, atol=1e-5
    )


def test_every_name_of_the_page_is_in_the_language() -> None:
    names = set(re.findall(r"\bT\.([A-Za-z_][A-Za-z_0-9]*)", PAGE.read_text(encoding="utf-8")))
    refused = {"get_thread_binding", "call_extern"}
    whole = {name for name in names if not name.endswith("_") or name == "assert_"} - refused
    assert not {name for name in whole if not hasattr(language, name)}
    for name in refused:
        with pytest.raises(tilecore.TileError):
            getattr(language, name)


def test_every_name_of_the_language_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", text))
    for start, ends in re.findall(r"\bT\.(\w+_)(\w+(?:/\w+)+)", text):  # T.reduce_sum/max
        words |= {start + end for end in ends.split("/")}
    assert not sorted(set(language.__all__) - words)
