"""Linear attention of a model as the CUDA compiler meets it: the fuser's spec has a kernel, or there is a reason."""

from pathlib import Path

import onnx
from region_oracle import scanned

from tilecore.contract.spec import ScanSpec
from tilecore.cuda.compile import candidates, generate
from tilecore.cuda.profile import H100

HEADS, WIDTH = 4, 64


def model(rule: str) -> onnx.ModelProto:
    """A LinearAttention of packed heads, f16, with its last state."""
    kind = onnx.TensorProto.FLOAT16
    shapes = {name: ["batch", "steps", HEADS * WIDTH] for name in ("query", "key", "value", "output")}
    shapes |= {"decay": ["batch", "steps", HEADS], "state": ["batch", HEADS, WIDTH, WIDTH]}
    values = {name: onnx.helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()}
    inputs = ["query", "key", "value", *(["", "decay"] if rule == "gated" else [])]
    node = onnx.helper.make_node(
        "LinearAttention", inputs, ["output", "state"], update_rule=rule, q_num_heads=HEADS, kv_num_heads=HEADS
    )
    graph = onnx.helper.make_graph(
        [node], "linear", [values[name] for name in inputs if name], [values["output"], values["state"]]
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 27)], ir_version=11)


def spec_of(rule: str, folder: Path) -> ScanSpec:
    (region,) = scanned(model(rule), folder).regions
    assert isinstance(region.spec, ScanSpec)
    return region.spec


def test_the_operator_has_a_kernel_with_both_results_stored_by_tensor_copies(tmp_path: Path) -> None:
    spec = spec_of("linear", tmp_path)
    (choice, *_) = candidates(spec, H100)
    text = generate(spec, choice, label="Kernel").text
    assert "&map_out0" in text
    assert "&map_out1" in text


def test_a_decay_per_head_and_step_is_part_of_it(tmp_path: Path) -> None:
    spec = spec_of("gated", tmp_path)
    (choice, *_) = candidates(spec, H100)
    assert "sum_line(" in generate(spec, choice, label="Kernel").text
