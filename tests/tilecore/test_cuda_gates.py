"""Gates that share reciprocals on CUDA: what they are found in, what they mean in float64, what has none."""

import numpy as np
import pytest
from cuda_specs import F32, ProductForm, axis, product_spec, tensor

from tilecore.contract.evaluate import Evaluator
from tilecore.contract.expr import Expr, Load, Var, binary, const, substitute, unary
from tilecore.cuda.compile import candidates, generate
from tilecore.cuda.gates import GATE, gate_of
from tilecore.cuda.profile import A100, H100

Y = Load(tensor("y", F32, 8, 8), (axis("m", 8), axis("n", 8)))
OTHER = Load(tensor("z", F32, 8, 8), (axis("m", 8), axis("n", 8)))
INNER = Var("value", F32)
CUBIC = const(0.7978845608, F32) * (Y + const(0.044715, F32) * Y * Y * Y)


@pytest.mark.parametrize(
    "value",
    [
        Y * const(0.5, F32) * (unary("tanh", CUBIC) + 1.0),
        const(0.5, F32) * (const(1.0, F32) + unary("tanh", CUBIC)) * Y,
        Y * unary("sigmoid", Y) + 3.0,
        unary("neg", const(0.25, F32) * Y * unary("sigmoid", const(1.702, F32) * Y)),
    ],
)
def test_a_gate_and_its_factor_mean_what_the_program_does(value: Expr) -> None:
    found = gate_of(value)
    assert found is not None
    numbers = np.concatenate([np.linspace(-50, 50, 2001), [1e4, -1e4, 1e30, np.inf, np.nan]])

    def of(expr: Expr, gate: np.ndarray | None = None) -> np.ndarray:
        values = {INNER: numbers} if gate is None else {INNER: numbers, GATE: gate}
        return np.asarray(Evaluator({}, {}, wide=True)(substitute(expr, {Y: INNER}), values), np.float64)

    with np.errstate(all="ignore"):
        gate = 1 / (1 + np.exp2(np.fmin(of(found.exponent), 30)))
        np.testing.assert_allclose(of(found.value, gate), of(value), rtol=1e-6, atol=np.abs(numbers[:-2]).max() * 1e-9)
        small = np.abs(numbers) <= 50
        np.testing.assert_allclose(of(found.value, gate)[small], of(value)[small], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "value",
    [
        unary("sigmoid", Y),  # NaN would be lost
        OTHER * unary("sigmoid", Y),
        Y * unary("sigmoid", Y) + unary("sigmoid", Y),  # once beside y alone
        Y * unary("sigmoid", Y * Y + Y * Y * Y),  # NaN of large numbers
        Y * unary("sigmoid", Y) * unary("sigmoid", OTHER) * OTHER,
        binary("max", Y, const(0.0, F32)),
    ],
)
def test_what_could_lose_a_nan_or_has_no_gate_is_left_alone(value: Expr) -> None:
    assert gate_of(value) is None


@pytest.mark.parametrize("program", ["gelu", "silu"])
def test_stores_of_warpgroups_share_reciprocals(program: str) -> None:
    spec = product_spec(ProductForm(512, 512, 512, program=program))
    for profile, shared in ((H100, True), (A100, False)):
        (choice, *_) = candidates(spec, profile)
        assert ("invert_fours(gates)" in generate(spec, choice, label="Kernel", profile=profile).text) is shared
