"""A gate and its partner that come from one weight, from file to result: one kernel each, one copy of the weight.

The oracle multiplies what the weights stand for in double precision. ONNX Runtime's own result was compared as well,
by `optimize`.
"""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from models.graph import GraphWriter
from runtime.compile import optimize
from runtime.options import Options
from runtime.session import DOMAIN, load
from tilecore.profile import detect_profile

pytestmark = pytest.mark.cpu
DEPTH, WIDTH, BLOCK = 64, 32, 32
SCALE, ZERO = 1 / 32, 128  # of the levels of activations: a power of two, so that x / SCALE is exact


def sigmoid(value: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-value))


class Gates:
    """A model of gated products of one input, and what each has for a weight [DEPTH, 2 · WIDTH] in real numbers."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.g = GraphWriter(21)
        self.x = self.g.input("x", np.float32, ("batch", "seq", DEPTH))
        self.weights: dict[str, np.ndarray] = {}

    def finish(self, name: str, gate: str, up: str) -> None:
        """silu(gate) · up as the output `name`."""
        g = self.g
        g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up, out=name)
        g.output(name, np.float32, ("batch", "seq", WIDTH))

    def halves(self, y: str) -> tuple[str, ...]:
        return self.g.ops("Split", y, outs=[None, None], axis=-1, num_outputs=2)

    def floats(self) -> None:
        """Cut by Slice, the partner's columns first."""
        weight = self.rng.standard_normal((DEPTH, 2 * WIDTH)).astype(np.float32) * np.float32(0.2)
        y = self.g.op("MatMul", self.x, self.g.initializer(weight))
        cuts = [
            self.g.op("Slice", y, *(self.g.constant([end]) for end in (first, first + WIDTH, 2)))
            for first in (WIDTH, 0)
        ]
        self.weights["floats"] = np.roll(weight, WIDTH, 1)
        self.finish("floats", *cuts)

    def bits(self) -> None:
        """MatMulNBits of 4 bits in blocks."""
        packed = self.rng.integers(0, 256, (2 * WIDTH, DEPTH // BLOCK, BLOCK // 2)).astype(np.uint8)
        scales = self.rng.uniform(0.01, 0.03, (2 * WIDTH, DEPTH // BLOCK)).astype(np.float32)
        inputs = (self.x, self.g.initializer(packed), self.g.initializer(scales))
        y = self.g.op("MatMulNBits", *inputs, domain="com.microsoft", K=DEPTH, N=2 * WIDTH, bits=4, block_size=BLOCK)
        levels = np.stack([packed & 15, packed >> 4], -1).reshape(2 * WIDTH, DEPTH).astype(np.float64) - 8
        self.weights["bits"] = (levels * np.repeat(scales, BLOCK, 1)).T
        self.finish("bits", *self.halves(y))

    def levels(self) -> None:
        """Bytes times bytes."""
        g = self.g
        weight = self.rng.integers(-127, 128, (DEPTH, 2 * WIDTH)).astype(np.int8)
        scales = self.rng.uniform(0.001, 0.002, 2 * WIDTH).astype(np.float32)
        own = g.constant(SCALE), g.constant(ZERO, np.uint8)
        x = g.op("DequantizeLinear", g.op("QuantizeLinear", self.x, *own), *own)
        real = g.op("DequantizeLinear", g.initializer(weight), g.initializer(scales), axis=1)
        self.weights["levels"] = weight.astype(np.float64) * scales
        self.finish("levels", *self.halves(g.op("MatMul", x, real)))


def test_gates_of_packed_weights_are_one_kernel_each(tmp_path: Path, object_cache: Path) -> None:
    made = Gates()
    for write in (made.floats, made.bits, made.levels):
        write()
    model = made.g.finish()
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, tmp_path / "model.onnx")
    output = tmp_path / "fused.onnx"
    options = Options(cache=object_cache.parent, fuse_all=True, target=detect_profile().target.name)
    report = optimize(tmp_path / "model.onnx", output, options=options, progress=lambda stage: None)
    assert not report.faults
    fused = onnx.load(output)
    products = [region for region in report.regions if region.kind == "contraction"]
    assert sorted(region.outputs for region in products) == [("bits",), ("floats",), ("levels",)]
    assert {node.domain for node in fused.graph.node if set(node.output) & set(made.weights)} == {DOMAIN}
    panels = [tensor for tensor in fused.graph.initializer if "panels" in tensor.name]
    levels = DEPTH * 2 * WIDTH + 4 * 2 * WIDTH  # bytes, with the sums of their columns behind them
    assert sorted(int(np.prod(t.dims)) for t in panels) == sorted(
        [DEPTH * 2 * WIDTH, DEPTH * WIDTH, levels, DEPTH // BLOCK * 2 * WIDTH]
    )
    x = made.rng.standard_normal((2, 37, DEPTH)).astype(np.float32)
    rounded = (np.clip(np.rint(x / SCALE) + ZERO, 0, 255) - ZERO) * SCALE
    found = load(output).run(list(made.weights), {"x": x})
    for (name, weight), value in zip(made.weights.items(), found, strict=True):
        y = (rounded if name == "levels" else x).astype(np.float64) @ weight
        gate, up = y[..., :WIDTH], y[..., WIDTH:]
        np.testing.assert_allclose(np.asarray(value), gate * sigmoid(gate) * up, rtol=1e-4, atol=1e-5, err_msg=name)
