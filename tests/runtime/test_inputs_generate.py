"""Generated inputs suit the model, given ones are checked."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from models import bert, minilm
from models.attention import SPELLINGS
from runtime import inputs

SMALL = bert.Size(layers=1, hidden=16, heads=2, vocab=20, positions=40)


def model_of(
    declared: dict[str, tuple[int, list[int | str | None]]],
    nodes: list[onnx.NodeProto] | None = None,
    weights: dict[str, np.ndarray] | None = None,
) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in declared.items()]
    tensors = [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()]
    return helper.make_model(helper.make_graph(nodes or [], "g", values, [], tensors))


FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def test_the_same_seed_gives_the_same_inputs() -> None:
    model = bert.model(size=SMALL)
    first, second, other = (
        inputs.generate(model, sizes={"batch": 3, "seq": 9}, seed=seed)["input_ids"] for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_ids_stay_inside_their_tables_and_masks_have_holes(exporter: bert.Exporter) -> None:
    feeds = inputs.generate(bert.model(exporter=exporter, size=SMALL), sizes={"batch": 3, "seq": 40}, seed=0)
    assert set(np.unique(feeds["token_type_ids"])) == {0, 1}
    assert 10 < feeds["input_ids"].max() < 20
    mask = feeds["attention_mask"]
    assert mask[0, 0] == 1
    assert mask[0, 1] == 0, "a hole"
    assert mask[0, 2:].all()
    assert not mask[1].any(), "a row that hides everything"
    assert mask[2, 0] == 1
    assert not mask[2, -13:].any(), "padding"


def test_masks_without_holes_on_request() -> None:
    feeds = inputs.generate(bert.model(size=SMALL), sizes={"batch": 3, "seq": 9}, seed=0, masks=False)
    assert feeds["attention_mask"].all()


def test_a_table_behind_casts_and_dequantisation_bounds_ids() -> None:
    nodes = [
        helper.make_node("Cast", ["ids"], ["narrow"], to=TensorProto.INT32),
        helper.make_node("DequantizeLinear", ["table", "scale"], ["wide"]),
        helper.make_node("Gather", ["wide", "narrow"], ["y"], axis=0),
    ]
    weights = {"table": np.zeros((6, 3), np.int8), "scale": np.array(0.1, np.float32)}
    model = model_of({"ids": (INT64, ["batch", "seq"])}, nodes, weights)
    values = inputs.generate(model, sizes={"batch": 30, "seq": 30}, seed=0)["ids"]
    assert (values.min(), values.max()) == (0, 5)


def test_roles_follow_names_and_uses() -> None:
    nodes = [
        helper.make_node("Cast", ["visible"], ["v"], to=FLOAT),
        helper.make_node("Add", ["scores", "attn_mask"], ["s"]),
    ]
    declared: dict[str, tuple[int, list[int | str | None]]] = {
        "visible": (INT64, ["b", "s"]),
        "position_ids": (INT64, ["b", "s"]),
        "flags": (BOOL, ["b", "s"]),
        "use_cache": (BOOL, [1]),
        "count": (INT64, []),
        "scores": (FLOAT, ["b", "s"]),
        "attn_mask": (FLOAT, ["b", "s"]),
        "padding_mask": (FLOAT, ["b", "s"]),
    }
    feeds = inputs.generate(model_of(declared, nodes), sizes={"b": 3, "s": 9}, seed=0, scale=30.0)
    assert set(np.unique(feeds["visible"])) == {0, 1}
    np.testing.assert_array_equal(feeds["position_ids"][1], np.arange(9))
    assert feeds["flags"].any()
    assert not feeds["flags"].all()
    assert feeds["count"].shape == ()
    assert 0 <= feeds["count"] < 4
    assert 10 < feeds["scores"].std() < 60
    assert set(np.unique(feeds["attn_mask"])) == {-10000.0, 0.0}
    assert set(np.unique(feeds["padding_mask"])) == {0.0, 1.0}
    assert {feeds[name].dtype for name in ("scores", "attn_mask", "padding_mask")} == {np.dtype(np.float32)}


def test_dims_may_be_sums_and_nameless() -> None:
    model = model_of(
        {"k": (FLOAT, ["batch", "past + seq"]), "q": (FLOAT, ["batch", "2 * seq"]), "u": (FLOAT, [None, 3])}
    )
    assert inputs.symbols(model) == ("batch", "past", "seq", "u[0]")
    feeds = inputs.generate(model, sizes={"batch": 2, "past": 5, "seq": 3, "u[0]": 4}, seed=0)
    assert {name: value.shape for name, value in feeds.items()} == {"k": (2, 8), "q": (2, 6), "u": (4, 3)}


def test_sizes_are_odd_distinct_and_totals_add_up() -> None:
    declared: dict[str, tuple[int, list[int | str | None]]] = {
        "ids": (INT64, ["batch_size", "sequence_length"]),
        "mask": (INT64, ["batch_size", "total_sequence_length"]),
        "past_key": (FLOAT, ["batch_size", 4, "past_sequence_length", 8]),
    }
    choices = inputs.size_choices(model_of(declared))
    for sizes in (choices.small[0], choices.large[0]):
        independent = [size for name, size in sizes.items() if "total" not in name]
        assert len(set(independent)) == 3
        assert all(size % 2 for size in independent)
        assert sizes["total_sequence_length"] == sizes["past_sequence_length"] + sizes["sequence_length"]
    assert choices.small[0] != choices.large[0]


def test_a_model_without_symbols_has_one_choice() -> None:
    assert inputs.size_choices(bert.model(size=SMALL, shape=(2, 7))) == inputs.SizeChoices(({},), (), ())


def test_traced_sizes_are_found_in_the_graphs_constants() -> None:
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["y"])]
    declared: dict[str, tuple[int, list[int | str | None]]] = {"x": (FLOAT, ["batch", "seq", 8])}
    choices = inputs.size_choices(model_of(declared, nodes, {"shape": np.array([2, 6, 2, 4])}))
    assert {"batch": 2, "seq": 6} in choices.fixed
    assert all(sizes["batch"] * sizes["seq"] <= 4096 for sizes in choices.fixed)


def test_a_dim_named_twice_gets_equal_sizes_in_the_end() -> None:
    nodes = [helper.make_node("Add", ["a", "b"], ["y"])]
    model = model_of({"a": (FLOAT, ["batch", "s1"]), "b": (FLOAT, ["batch", "s2"])}, nodes)
    model.graph.output.append(helper.make_tensor_value_info("y", FLOAT, None))
    model.ir_version = 8
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    choices = inputs.size_choices(model)
    ort.set_default_logger_severity(4)
    sizes, _ = inputs.first_fitting(model, lambda feeds: session.run(None, dict(feeds)), choices.small, seed=0)
    assert sizes is not None
    assert sizes["s1"] == sizes["s2"]


def test_nothing_fits_says_what_the_runtime_said() -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("too long")

    model = bert.model(size=SMALL)
    assert inputs.first_fitting(model, refuse, [{"batch": 1, "seq": 3}], seed=0) == (None, "batch=1, seq=3: too long")


@pytest.mark.parametrize("model", [minilm.model(layers=1, hidden=16, heads=2, vocab=20)], ids=["minilm"])
def test_generated_inputs_run(model: onnx.ModelProto) -> None:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    choices = inputs.size_choices(model)
    for sizes in (choices.small[0], choices.large[0]):
        session.run(None, inputs.generate(model, sizes=sizes, seed=0))


def test_every_spelling_gets_inputs_that_run() -> None:
    ort.set_default_logger_severity(4)
    for entry in SPELLINGS:
        model = entry.build(dynamic=True)
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        choices = inputs.size_choices(model)
        every = (*choices.small, *choices.large, *choices.fixed)
        sizes, reason = inputs.first_fitting(model, lambda feeds, s=session: s.run(None, dict(feeds)), every, seed=0)
        assert sizes is not None, f"{entry.name}: {reason}"


def test_missing_size_is_named() -> None:
    with pytest.raises(inputs.InputError, match="input 'input_ids' needs a size for 'seq'; given: batch"):
        inputs.generate(bert.model(size=SMALL), sizes={"batch": 2}, seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda feeds: feeds.pop("token_type_ids"), "missing token_type_ids; expected input_ids int64"),
        (lambda feeds: feeds.update(extra=np.zeros(1)), "unknown extra; expected"),
        (
            lambda feeds: feeds.update(input_ids=np.zeros((2, 5), np.int32)),
            "input 'input_ids' has dtype int32, expected int64",
        ),
        (
            lambda feeds: feeds.update(input_ids=np.zeros((2, 5, 1), np.int64)),
            r"input 'input_ids' has shape \[2, 5, 1\], expected \['batch', 'seq'\]",
        ),
    ],
    ids=["missing", "unknown", "dtype", "shape"],
)
def test_archive_that_does_not_suit_is_refused(tmp_path: Path, change: object, message: str) -> None:
    feeds = {name: np.ones((2, 5), np.int64) for name in bert.INPUTS}
    path = tmp_path / "feeds.npz"
    np.savez(path, allow_pickle=False, **feeds)
    assert inputs.load(path, bert.model(size=SMALL)).keys() == feeds.keys()
    assert callable(change)
    change(feeds)
    np.savez(path, allow_pickle=False, **feeds)
    with pytest.raises(inputs.InputError, match=message):
        inputs.load(path, bert.model(size=SMALL))


def test_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "feeds.npz"
    path.write_bytes(b"nothing")
    with pytest.raises(inputs.InputError, match=r"feeds\.npz is not a readable \.npz file"):
        inputs.load(path, bert.model(size=SMALL))


def test_strings_and_sequences_are_refused() -> None:
    with pytest.raises(inputs.InputError, match="input 'text' holds strings"):
        inputs.generate(model_of({"text": (TensorProto.STRING, ["n"])}), sizes={"n": 2}, seed=0)
    model = model_of({})
    model.graph.input.append(helper.make_tensor_sequence_value_info("many", FLOAT, None))
    with pytest.raises(inputs.InputError, match="input 'many' is a sequence_type"):
        inputs.read(model)


HEADS, KEY_HEADS, WIDTH = 4, 2, 8
Declared = dict[str, tuple[int, list[int | str | None]]]


def with_past(node: onnx.NodeProto, declared: Declared, dims: dict[str, str | None]) -> onnx.ModelProto:
    """A model of one operator: the dims of `declared` that are names of `dims` are called what that says."""
    named: Declared = {
        name: (kind, [dims.get(dim, dim) if isinstance(dim, str) else dim for dim in shape])
        for name, (kind, shape) in declared.items()
    }
    outputs = [helper.make_tensor_value_info(name, FLOAT, None) for name in node.output]
    values = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in named.items()]
    imports = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "g", values, outputs), opset_imports=imports, ir_version=11)


INT32 = TensorProto.INT32
CACHE: Declared = {
    "past_key": (FLOAT, ["B", KEY_HEADS, "P", WIDTH]),
    "past_value": (FLOAT, ["B", KEY_HEADS, "P", WIDTH]),
}
WITH_PAST: dict[str, tuple[onnx.NodeProto, Declared]] = {
    "GroupQueryAttention": (
        helper.make_node(
            "GroupQueryAttention",
            ["query", "key", "value", "past_key", "past_value", "seqlens", "total"],
            ["y", "present_key", "present_value"],
            domain="com.microsoft",
            num_heads=HEADS,
            kv_num_heads=KEY_HEADS,
        ),
        {
            "query": (FLOAT, ["B", "S", HEADS * WIDTH]),
            "key": (FLOAT, ["B", "S", KEY_HEADS * WIDTH]),
            "value": (FLOAT, ["B", "S", KEY_HEADS * WIDTH]),
            **CACHE,
            "seqlens": (INT32, ["B"]),
            "total": (INT32, []),
        },
    ),
    "MultiHeadAttention": (
        helper.make_node(
            "MultiHeadAttention",
            ["query", "key", "value", "", "mask", "", "past_key", "past_value"],
            ["y", "present_key", "present_value"],
            domain="com.microsoft",
            num_heads=KEY_HEADS,
        ),
        {
            **{name: (FLOAT, ["B", "S", KEY_HEADS * WIDTH]) for name in ("query", "key", "value")},
            "mask": (INT32, ["B", "T"]),
            **CACHE,
        },
    ),
    "Attention": (
        helper.make_node(
            "Attention", ["q", "k", "v", "mask", "past_key", "past_value"], ["y", "present_key", "present_value"]
        ),
        {
            "q": (FLOAT, ["B", HEADS, "S", WIDTH]),
            **{name: (FLOAT, ["B", KEY_HEADS, "S", WIDTH]) for name in ("k", "v")},
            "mask": (FLOAT, ["S", "T"]),
            **CACHE,
        },
    ),
    "Attention with lengths": (
        helper.make_node("Attention", ["q", "k", "v", "", "", "", "valid"], ["y"]),
        {
            "q": (FLOAT, ["B", HEADS, "S", WIDTH]),
            **{name: (FLOAT, ["B", KEY_HEADS, "T", WIDTH]) for name in ("k", "v")},
            "valid": (INT64, ["B"]),
        },
    ),
    "TensorScatter": (
        helper.make_node("TensorScatter", ["cache", "update", "indices"], ["y"]),
        {
            "cache": (FLOAT, ["B", KEY_HEADS, "T", WIDTH]),
            "update": (FLOAT, ["B", KEY_HEADS, "S", WIDTH]),
            "indices": (INT64, ["B"]),
        },
    ),
}


@pytest.mark.parametrize("named", [True, False], ids=["named dims", "nameless dims"])
@pytest.mark.parametrize(("node", "declared"), WITH_PAST.values(), ids=list(WITH_PAST))
def test_operators_with_a_past_get_lengths_that_fit(node: onnx.NodeProto, declared: Declared, named: bool) -> None:
    names = ("B", "S", "P", "T")
    model = with_past(node, declared, dict(zip(names, names, strict=True)) if named else dict.fromkeys(names))
    ort.set_default_logger_severity(4)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    choices = inputs.size_choices(model)
    for ladder in (choices.small, choices.large):
        sizes, reason = inputs.first_fitting(model, lambda feeds: session.run(None, dict(feeds)), ladder, seed=0)
        assert sizes is not None, reason
        if "T" in sizes and "P" in sizes:
            assert sizes["T"] == sizes["P"] + sizes["S"]


def test_lengths_reach_their_limits_and_stay_inside() -> None:
    node, declared = WITH_PAST["GroupQueryAttention"]
    model = with_past(node, declared, {})
    feeds = inputs.generate(model, sizes={"B": 64, "S": 3, "P": 5}, seed=0)
    assert feeds["total"] == 8
    assert feeds["seqlens"].min() >= 2
    assert feeds["seqlens"].max() == feeds["seqlens"][0] == 7
    assert len(set(feeds["seqlens"])) > 3
    assert (inputs.generate(model, sizes={"B": 4, "S": 3, "P": 5}, seed=0, masks=False)["seqlens"] == 7).all()
    node, declared = WITH_PAST["TensorScatter"]
    model = with_past(node, declared, {})
    feeds = inputs.generate(model, sizes={"B": 64, "S": 3, "T": 9}, seed=0)
    assert feeds["indices"].min() == 0
    assert feeds["indices"].max() == 6
