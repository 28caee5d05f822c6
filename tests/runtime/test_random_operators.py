"""Random graphs, fused whole, against ONNX Runtime without its optimisations; `--graphs N` runs more than the suite's
few, from the seed that `--first-graph` names. Nothing is verified or left out on the way, which would hide a fault.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from random_operators import RandomGraph, session

from runtime.compile import optimize
from runtime.options import Options
from runtime.session import load

pytestmark = pytest.mark.cpu
TOLERANCE = 1e-4  # of an output's largest element, or of 1


def test_random_graphs_keep_their_meaning(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    first, count = (int(str(request.config.getoption(name))) for name in ("--first-graph", "--graphs"))
    regions = 0
    for seed in range(first, first + count):
        regions += fused(seed, tmp_path)
    assert regions >= count  # else nothing was put to the test


def fused(seed: int, folder: Path) -> int:
    """The regions of a seed's graph, which gives what it should."""
    graph = RandomGraph(seed)
    model = graph.model()
    if not model.graph.output:
        return 0
    path, output = folder / f"{seed}.onnx", folder / f"{seed}.fused.onnx"
    onnx.save(model, path)
    options = replace(Options.from_environment(), fuse_all=True)
    report = optimize(path, output, options=options, progress=lambda stage: None, verify=False)
    assert not report.faults, f"graph {seed}: {report.faults}"
    names = [value.name for value in model.graph.output]
    wanted = session(model).run(names, graph.feeds())
    actual = load(output).run(names, graph.feeds())
    for name, given, found in zip(names, map(np.asarray, wanted), map(np.asarray, actual), strict=True):
        what = f"graph {seed}, {name}"
        assert (found.dtype, found.shape) == (given.dtype, given.shape), what
        scale = np.abs(given.astype(np.float64)).max(initial=1)
        np.testing.assert_allclose(found, given, rtol=0, atol=TOLERANCE * scale, err_msg=what)
    return len(report.regions)
