"""The comparison of two results: rounding passes, everything else fails, and the words say where."""

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from runtime.compare import Truth, compare, compare_signal, drift_of, is_rounding
from runtime.oracle import SIGMOID_STEP


def random_product(terms: int, dtype: type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One product in the given precision, summed forwards and backwards, and in float64."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((50, terms)).astype(dtype) for _ in range(2))
    products = (a * b).astype(dtype)
    truth = np.sum(a.astype(np.float64) * b.astype(np.float64), axis=1)
    forwards, backwards = (np.add.accumulate(p, axis=1)[:, -1] for p in (products, products[:, ::-1]))
    return forwards, backwards, truth


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("terms", [1, 16, 700, 3072])
def test_another_order_of_summation_passes(dtype: type, terms: int) -> None:
    forwards, backwards, truth = random_product(terms, dtype)
    assert compare("y", forwards, backwards, truth=Truth(truth, terms)).fault is None


@pytest.mark.parametrize("terms", [16, 700, 3072])
def test_a_dropped_term_fails(terms: int) -> None:
    random = np.random.default_rng(1)
    a, b = (random.standard_normal((50, terms)).astype(np.float32) for _ in range(2))
    full, short = (a * b).sum(axis=1), (a * b)[:, :-1].sum(axis=1)
    truth = np.sum(a.astype(np.float64) * b.astype(np.float64), axis=1)
    assert compare("y", full, short, truth=Truth(truth, terms)).fault


def test_the_originals_noise_is_allowed_in_its_row_only() -> None:
    truth = np.ones((2, 4))
    expected = np.array([[1, 1, 1, 1], [1.001, 1, 1, 1]], np.float32)
    noisy_row, calm_row = expected.copy(), expected.copy()
    noisy_row[1, 3] = 1.004
    calm_row[0, 3] = 1.004
    assert compare("y", expected, noisy_row, truth=Truth(truth, 1)).fault is None
    fault = compare("y", expected, calm_row, truth=Truth(truth, 1)).fault
    assert fault is not None
    assert fault.startswith("element [0, 3] is 1.00399995, expected 1 within ")
    assert fault.endswith("(1 of 8 elements are off)")


def test_errors_are_measured_against_the_outputs_own_size() -> None:
    expected = np.full((4, 4), 1e-6, np.float32)
    error = compare("y", expected, expected * np.float32(1.01), truth=Truth(expected.astype(np.float64), 64))
    assert error.fault
    assert error.max_abs == pytest.approx(1e-8, rel=1e-2)
    assert error.max_rel == pytest.approx(1e-2, rel=1e-2)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [(np.nan, 0.0), (0.0, np.nan), (np.inf, -np.inf), (np.inf, 3e38), (1.0, np.inf), (np.nan, np.inf)],
)
def test_values_that_are_not_finite_must_match(wanted: float, found: float) -> None:
    expected, actual = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
    expected[1, 2], actual[1, 2] = wanted, found
    error = compare("y", expected, actual, truth=None)
    assert error.fault == f"element [1, 2] is {np.float32(found)}, expected {np.float32(wanted)}"
    assert np.isfinite(error.max_abs)


def test_matching_values_that_are_not_finite_pass() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    assert compare("y", values, values.copy(), truth=Truth(values.astype(np.float64), 1)).fault is None


def test_all_nan_and_empty_outputs_pass() -> None:
    for values in (np.full((2, 2), np.nan, np.float32), np.zeros((0, 3), np.float32)):
        assert compare("y", values, values.copy(), truth=Truth(values.astype(np.float64), 1)).fault is None


def test_shape_and_dtype_must_match() -> None:
    expected = np.ones((2, 3), np.float32)
    assert compare("y", expected, expected[0], truth=None).fault == ("is float32[3], expected float32[2, 3]")
    assert compare("y", expected, expected.astype(np.float64), truth=None).fault


def test_integers_are_exact_but_for_ties_that_rounding_decides() -> None:
    expected, actual = np.array([4, 7]), np.array([4, 8])
    assert compare("y", expected, actual, truth=Truth(expected, 1)).fault == "element [1] is 8, expected 7"
    assert compare("y", expected, actual, truth=Truth(np.array([4, 8]), 1)).fault is None
    assert compare("y", expected, actual, truth=None).fault


def test_bfloat16_has_its_own_unit() -> None:
    expected = np.ones((3, 3)).astype(ml_dtypes.bfloat16)
    near = (np.ones((3, 3)) + 2**-7).astype(ml_dtypes.bfloat16)
    assert compare("y", expected, near, truth=Truth(expected.astype(np.float64), 1)).fault is None
    far = (np.ones((3, 3)) + 2**-4).astype(ml_dtypes.bfloat16)
    assert compare("y", expected, far, truth=Truth(expected.astype(np.float64), 1)).fault


def test_an_oracle_of_another_meaning_is_no_rounding() -> None:
    values = np.random.default_rng(0).standard_normal((20, 20))
    assert is_rounding(values.astype(np.float32), values)
    assert not is_rounding((values * 1.01).astype(np.float32), values)
    noisy = values.astype(np.float32)
    noisy[3] *= np.float32(1.01)
    assert is_rounding(noisy, values), "one noisy row is rounding still"


def test_a_model_that_quantises_may_drift_as_far_as_rounding_moves_the_original() -> None:
    rng = np.random.default_rng(3)
    expected = rng.standard_normal((8, 64)).astype(np.float32)
    noise = rng.standard_normal((8, 64)).astype(np.float32)
    assert drift_of(expected, expected + 0.01 * noise) == pytest.approx(0.01, rel=0.1)
    for own, fine, wrong in ((0.0, 0.01, 0.03), (0.05, 0.15, 0.25), (1.0, 0.4, 0.6), (None, 0.4, 0.6)):
        assert compare_signal("y", expected, expected + np.float32(fine) * noise, own=own).fault is None
        assert compare_signal("y", expected, expected + np.float32(wrong) * noise, own=own).fault is not None
    one = expected.copy()
    one[2, 3] = np.nan
    assert compare_signal("y", expected, one, own=0.1).fault is not None


def test_what_a_rounding_of_the_inputs_does_is_allowed_in_its_row_only() -> None:
    expected = np.ones((2, 4), np.float32)  # right by luck, in a row that one rounding of the inputs moves by 1e-5
    moved = expected + np.array([[0, 1e-5, 0, 0], [0, 0, 0, 0]], np.float32)
    truth = Truth(np.ones((2, 4)), 4, others=(moved,))
    near, far, other_row = expected.copy(), expected.copy(), expected.copy()
    near[0, 2], far[0, 2], other_row[1, 2] = 1 + 3e-5, 1 + 3e-4, 1 + 3e-5
    assert compare("y", expected, near, truth=truth).fault is None
    assert compare("y", expected, far, truth=truth).fault
    assert compare("y", expected, other_row, truth=truth).fault


def test_small_results_of_a_sigmoid_are_known_to_be_coarse() -> None:
    x = np.linspace(-19, -11, 400, dtype=np.float32)
    exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    node = helper.make_node("Sigmoid", ["x"], ["y"])
    read, written = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N"]) for name in ("x", "y"))
    graph = helper.make_graph([node], "sigmoid", [read], [written])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString())
    own = np.asarray(session.run(None, {"x": x})[0])
    assert not is_rounding(own, exact)  # most are off by more than a share of their size
    assert is_rounding(own, exact, step=SIGMOID_STEP)
    assert not is_rounding(own + np.float32(1e-5), exact, step=SIGMOID_STEP)
    ours = exact.astype(np.float32)
    assert compare("y", own, ours, truth=Truth(exact, 1)).fault is None
    assert compare("y", own, ours + np.float32(1e-5), truth=Truth(exact, 1)).fault is not None


def test_a_channel_that_is_off_everywhere_is_judged_by_its_own_error() -> None:
    random = np.random.default_rng(3)
    truth = random.standard_normal((40, 64))
    noise = random.standard_normal((40, 64)) * 1e-7
    noise[:, 9] *= 50  # a large gain
    noise[5, 9] = 0.0  # where the original is right by luck
    expected = (truth + noise).astype(np.float32)
    other = np.array(expected)
    other[5, 9] = np.float32(truth[5, 9] + 1.2e-5)
    assert compare("y", expected, other, truth=Truth(truth, 64)).fault is None
    other[5, 8] = np.float32(truth[5, 8] + 1.2e-5)
    assert "[5, 8]" in str(compare("y", expected, other, truth=Truth(truth, 64)).fault)


def test_overflow_is_infinite_or_nan_but_never_a_number() -> None:
    expected = np.array([np.nan, np.inf, np.inf, 1.0, 3e37], np.float32)
    exact, real = np.array([np.inf, 2e38, np.inf, 1.0, 3e37]), np.array([3e40, 2e38, -np.inf, 1.0, 3e37])
    truth = Truth(exact, 4, real=real)

    def fault(*values: float) -> str | None:
        return compare("y", expected, np.array(values, np.float32), truth=truth).fault

    assert fault(np.inf, np.nan, np.inf, 1.0, 3e37) is None
    assert fault(np.inf, np.nan, np.inf, 1.0, np.inf) is None
    assert fault(np.nan, 2e38, np.inf, 1.0, 3e37) is None  # the number that the original's sum lost on the way
    assert fault(1.0, np.inf, np.inf, 1.0, 3e37) is not None
    assert fault(np.nan, 3e38, np.inf, 1.0, 3e37) is not None
    assert fault(np.nan, np.inf, np.nan, 1.0, 3e37) is not None  # infinite in real numbers too
    assert fault(np.nan, np.inf, np.inf, np.nan, 3e37) is not None
    assert fault(np.nan, np.inf, np.inf, 1.0, 2e37) is not None
    other = np.array([np.inf, np.inf, np.inf, 1.0, 3e37], np.float32)
    assert compare("y", expected, other, truth=Truth(exact, 4)).fault is not None
