"""Kernels for NVIDIA cards in a library: what it asks of the driver, recorded where there is no card; on one, results.

The host is `played_runtime.py`, which gives the library what ONNX Runtime with its CUDA provider would.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import card_library
import native_build
import numpy as np
import pytest
from card_specs import flat_product, masked_attention, packed_attention, rotated_attention
from chunked_forms import LinearForm, linear_spec
from cuda_specs import BF16, F16, F32, AttentionForm, ProductForm, RowForm, attention_spec, product_spec, row_spec
from played_runtime import PROVIDER, PlayedRuntime, Value

from tilecore.canonical import canonical
from tilecore.contract.evaluate import evaluate
from tilecore.contract.expr import Load, Sym
from tilecore.contract.narrow import narrowed
from tilecore.contract.spec import Spec, outputs_of, views_of
from tilecore.cuda.kernel import KernelPlan
from tilecore.cuda.profile import A100

pytestmark = pytest.mark.cpu
STREAM = 0xC5  # a stream of the context 0xc0
X, W, BIAS = 0x1000000, 0x1100000, 0x1200000
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cards")


@pytest.fixture(scope="session")
def fake(cache: Path) -> Path:
    """The recording driver, under the name that libraries look for."""
    path = cache / "libcuda.so.1"
    source = native_build.SOURCES / "fake_cuda.c"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*native_build.find_compiler(), *flags, str(source), "-o", str(path)], check=True)
    return path


@pytest.fixture(scope="session")
def product(cache: Path) -> card_library.Made:
    return card_library.make_library(product_spec(ProductForm(Sym("M"), 1016, 1032, F16, program="bias")), cache)


@pytest.fixture(scope="session")
def rotated(cache: Path) -> card_library.Made:
    return card_library.make_library(rotated_attention(), cache)


def call(made: card_library.Made, fake: Path | None, **options: Any) -> dict[str, Any]:
    """What a call of the library's op with `options` does: see fake_card_runner.py."""
    command = [sys.executable, str(HERE / "fake_card_runner.py"), str(fake or "none"), str(made.path)]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    done = subprocess.run(
        [*command, json.dumps(options)], capture_output=True, text=True, check=False, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def product_inputs(rows: int = 1500) -> list[Any]:
    return [[X, 10, [rows, 1032]], [W, 10, [1016, 1032]], [BIAS, 10, [1016]]]


def test_one_op_for_each_provider(product: card_library.Made, fake: Path) -> None:
    found = call(product, fake, inputs=product_inputs(), arguments="mmmpi")
    assert found["cpu"] == found["cuda"] == [product.op]
    assert found["refused"] == ""


def test_a_product_is_launched_as_planned(product: card_library.Made, fake: Path) -> None:
    found = call(product, fake, inputs=product_inputs(), arguments="mmmpi")
    many = product.region.kernels[1]
    plan = many.plan
    rows, columns, deep = ([*reversed(one.box)] for one in plan.maps[:3])
    maps = [line for line in found["log"] if line.startswith("map ")]
    assert maps == [
        f"map 0 at {X:x} type 6 swizzle 3 dims 1032 1500 pitches 2064 box {rows[0]} {rows[1]}",
        f"map 1 at {W:x} type 6 swizzle 3 dims 1032 1016 pitches 2064 box {columns[0]} {columns[1]}",
        f"map 2 at 2000000 type 6 swizzle 3 dims 1016 1500 pitches 2032 box {deep[0]} {deep[1]}",
    ]
    assert isinstance(plan, KernelPlan)
    block_m, block_n = plan.roles.block_rows, plan.maps[1].box[0]
    tiles = -(-1500 // block_m) * -(-1016 // block_n)
    (launch,) = [line for line in found["log"] if line.startswith("launch ")]
    assert launch == (
        f"launch {many.name} grid {min(tiles, 132)} 1 1 block {plan.threads} 1 1 "
        f"shared {plan.shared_bytes} stream c5 extra 0 attribute 6 is 1 with map 0 map 1 map 2 {BIAS:x} 1500"
    )
    assert f"attribute 8 {plan.shared_bytes}" in found["log"]
    assert "load elf" in found["log"]


@pytest.mark.parametrize(("rows", "kernel"), [(1, 0), (16, 0), (17, 1)])
def test_few_rows_have_a_kernel_of_their_own(product: card_library.Made, fake: Path, rows: int, kernel: int) -> None:
    found = call(product, fake, inputs=product_inputs(rows))
    assert found["refused"] == ""
    (launch,) = [line for line in found["log"] if line.startswith("launch ")]
    assert launch.split()[1] == product.region.kernels[kernel].name


def test_a_library_for_sm_80_runs_on_cards_8_x_and_is_refused_by_others(fake: Path, cache: Path) -> None:
    made = card_library.make_library(product_spec(ProductForm(Sym("M"), 1016, 1032, F16)), cache, card=A100)
    inputs = product_inputs()[:2]
    found = call(made, fake, inputs=inputs, arguments="pppi", driver={"fake_major": 8, "fake_room": 166912})
    assert found["refused"] == ""
    many = made.region.kernels[1]
    plan = many.plan
    assert isinstance(plan, KernelPlan)
    columns = 2 * plan.roles.fragments["c"] // plan.roles.strips
    tiles = -(-1500 // plan.roles.block_rows) * -(-1016 // columns)
    (launch,) = [line for line in found["log"] if line.startswith("launch ")]
    assert launch == (
        f"launch {many.name} grid {min(tiles, 132 * plan.blocks)} 1 1 block {plan.threads} 1 1 "
        f"shared {plan.shared_bytes} stream c5 extra 0 with {X:x} {W:x} 2000000 1500"
    )
    refused = call(made, fake, inputs=inputs, arguments="pppi")["refused"]
    assert (
        "built for sm_80, which is compute capability 8.0; Imaginary has 9.0. Build it with --target cuda," in refused
    )
    narrow = call(made, fake, inputs=inputs, arguments="pppi", driver={"fake_major": 8, "fake_room": 101376})["refused"]
    assert "bytes of shared memory, and this card has 101376 for a block" in narrow


def test_kernels_are_loaded_once(product: card_library.Made, fake: Path) -> None:
    found = call(product, fake, inputs=product_inputs(), arguments="mmmpi mmmpi mmmpi", times=3)
    assert found["log"].count("load elf") == 2  # one kernel for few rows, one for many
    assert sum(line.startswith("launch ") for line in found["log"]) == 3


def test_maps_of_the_same_memory_are_encoded_once(product: card_library.Made, fake: Path) -> None:
    found = call(product, fake, inputs=product_inputs(), arguments="mmmpi mmmpi mmmpi", times=3)
    launches = [line.partition(" with ")[2] for line in found["log"] if line.startswith("launch ")]
    outputs = [line for line in found["log"] if line.startswith("map ") and " dims 1016 1500 " in line]
    maps = [line for line in found["log"] if line.startswith("map ")]
    assert len(maps) == 2 + len(outputs)  # the inputs' once, the output's wherever it lay elsewhere
    assert all(line.startswith("map 0 map 1 map ") for line in launches)


def test_no_rows_launch_nothing(product: card_library.Made, fake: Path) -> None:
    found = call(product, fake, inputs=product_inputs(0))
    assert found["refused"] == ""
    assert not [line for line in found["log"] if line.startswith(("launch", "map"))]


def test_the_stream_says_which_context(product: card_library.Made, fake: Path) -> None:
    found = call(product, fake, inputs=product_inputs(), arguments="mmmpi", stream=0xD7)
    log = found["log"]
    launch = next(i for i, line in enumerate(log) if line.startswith("launch "))
    assert log.index("push d0") < launch < log.index("pop")
    assert log.count("load elf") == 4  # in the context of the session, then in the stream's


def test_computed_operands_go_through_scratch(rotated: card_library.Made, fake: Path) -> None:
    kinds = " ".join(
        "m" * len(one.plan.maps) + "p" * len(one.plan.pointers) + "i" * len(one.plan.symbols)
        for one in rotated.region.kernels
    )
    shapes = [[2, 70, 4, 64], [2, 70, 2, 64], [2, 70, 2, 64], [70, 64], [70, 64]]
    inputs = [[X + i * 0x100000, 10, shape] for i, shape in enumerate(shapes)]
    found = call(rotated, fake, inputs=inputs, arguments=kinds)
    assert found["refused"] == ""
    assert found["allocated"] == [0x3000000, 0x3100000]
    assert sorted(found["freed"]) == found["allocated"]
    launches = [line for line in found["log"] if line.startswith("launch ")]
    assert len(launches) == 3
    assert " 3000000" in launches[0]
    assert " 3100000" in launches[1]
    read = [line for line in found["log"] if line.startswith("map ")]
    assert any(
        "at 3000000 type 6 swizzle 3 dims 64 70 4 2 " in line for line in read
    )  # queries as (batch, head, query, d)
    assert any(
        "at 3100000 type 6 swizzle 3 dims 64 70 2 2 " in line for line in read
    )  # keys once per head that others share


def test_counters_of_tasks_that_share_a_result_are_cleared_before_every_launch(cache: Path, fake: Path) -> None:
    made = card_library.make_library(attention_spec(AttentionForm(Sym("B"), 8, 1, 1024, 128, F16, groups=4)), cache)
    (kernel,) = made.region.kernels
    plan = kernel.plan
    assert isinstance(plan, KernelPlan)
    assert plan.workspace is not None
    shapes = [[3, 8, 1, 128], [3, 2, 1024, 128], [3, 2, 1024, 128]]
    inputs = [[X + i * 0x100000, 10, shape] for i, shape in enumerate(shapes)]
    found = call(made, fake, inputs=inputs, arguments="mmmppi mmmppi", times=2)
    assert found["refused"] == ""
    tasks = 3 * 2 * plan.split.tasks
    log = [line for line in found["log"] if line.startswith(("set ", "launch "))]
    for place, (cleared, launch) in zip((0x3000000, 0x3100000), (log[:2], log[2:]), strict=True):
        assert cleared == f"set {place:x} to 0 words 32 rows {tasks} pitch {4 * plan.task_words} stream c5"
        assert f" grid {min(tasks, 132)} 1 1 " in launch
        assert launch.endswith(f" {place:x} 3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"driver": {"fake_major": 8}}, "built for sm_90a, which is compute capability 9.0; Imaginary has 8.0. Build"),
        ({"driver": {"fake_room": 1024}}, "takes "),
        ({"driver": {"fake_failing": 700}}, "cuLaunchKernelEx failed: an illegal memory access was encountered (700)"),
        ({"inputs": [[X + 8, 10, [5, 1032]], *product_inputs()[1:]]}, "tensor 0 starts at 0x1000008; kernels on cards"),
        ({"inputs": [[X, 10, [5, 1031]], *product_inputs()[1:]]}, "input 0, dim 1: expected 1032, found 1031"),
        ({"inputs": [[X, 1, [5, 1032]], *product_inputs()[1:]]}, "input 0 has ONNX element type 1, expected 10"),
        ({"inputs": product_inputs(2**31)}, "dim 0 of x0 is 2147483648: CUDA kernels count in 32 bits"),
        ({"driver": {"fake_current": 0}, "stream": 0}, "no CUDA context is current, and no stream names one"),
    ],
)
def test_refusals(product: card_library.Made, fake: Path, options: dict[str, Any], message: str) -> None:
    found = call(product, fake, **{"inputs": product_inputs(), "arguments": "mmmpi", **options})
    assert f"{product.op}: {message}" in found["refused"]


def test_without_a_driver_the_op_for_cards_says_so(product: card_library.Made) -> None:
    found = call(product, None, inputs=product_inputs())
    assert "the CUDA driver was not found" in found["refused"]
    assert "without CUDAExecutionProvider it runs on the processor" in found["refused"]


SIZES = {"M": 333, "S": 130, "B": 2, "(S * 2)": 260, "F": 5, "Q": 1, "T": 3, "K": 900}


def rounded_product() -> Spec:
    """Of a model in float32 whose operands are rounded to bfloat16, the weights when they are stored."""
    spec = product_spec(ProductForm(Sym("M"), 520, 512, F32, program="bias"))
    x, w, bias = spec.inputs
    constant = replace(w, constant=True)
    right = replace(spec.b, value=Load(constant, (spec.b.axes[2], spec.b.axes[1])))
    return narrowed(replace(spec, inputs=(x, constant, bias), b=right))


SPECS = {
    "rounded product": rounded_product(),
    "rounded attention": narrowed(attention_spec(AttentionForm(2, 4, Sym("S"), Sym("S"), 64, F32, causal=True))),
    "product": product_spec(ProductForm(Sym("M"), 520, 512, F16, program="gelu")),
    "rows of weights": product_spec(ProductForm(77, 520, 512, BF16, right_rows=True, program="residual")),
    "few rows": product_spec(ProductForm(3, 1000, 2048, F16, program="bias")),
    "few rows at run time": product_spec(ProductForm(Sym("F"), 1000, 2048, F16, program="bias")),
    "linear attention": linear_spec(LinearForm(2, 3, 130, 64, 64, F16)),
    "attention": attention_spec(AttentionForm(2, 4, Sym("S"), Sym("S"), 64, F16, causal=True)),
    "decode": attention_spec(AttentionForm(1, 32, 1, 900, 128, F16, groups=4)),
    "decode of a batch at run time": attention_spec(AttentionForm(Sym("B"), 8, 1, 900, 128, F16, groups=4)),
    "one query at run time": attention_spec(AttentionForm(2, 8, Sym("Q"), Sym("K"), 128, F16, groups=4)),
    "few queries at run time": attention_spec(AttentionForm(2, 8, Sym("T"), Sym("K"), 128, F16, groups=4)),
    "rotated": rotated_attention(),
    "packed": packed_attention(),
    "masked": masked_attention(),
    "siblings": flat_product(siblings=3, scaled=True),
    "layernorm": row_spec(RowForm("layernorm", Sym("M"), 768, F16)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_on_a_card(spec: Spec, cache: Path) -> None:
    torch = pytest.importorskip("torch")
    spec = canonical(spec)
    made = card_library.make_library(spec, cache)
    kinds = {
        "f32": (torch.float32, 1), "f16": (torch.float16, 10), "bf16": (torch.bfloat16, 16), "bool": (torch.bool, 9),
        "i64": (torch.int64, 7),
    }  # fmt: skip
    kept: list[Any] = []

    def value(shape: tuple[int, ...], dtype: str, fill: Any) -> Value:
        kind, code = kinds[dtype]
        array = fill(shape).to("cuda", kind)
        kept.append(array)
        return Value(array.data_ptr(), code, shape)

    random = torch.Generator().manual_seed(0)

    def drawn(dtype: str) -> Any:
        """What fills an input: booleans are true in most places, integers 0 or ±1."""
        if dtype == "bool":
            return lambda shape: torch.rand(shape, generator=random) > 0.3
        return lambda shape: torch.randn(shape, generator=random).clamp(-3, 3)

    shapes = [tuple(SIZES.get(str(dim)) or int(str(dim)) for dim in tensor.shape) for tensor in spec.inputs]
    inputs = [
        value(shape, str(tensor.dtype), drawn(str(tensor.dtype)))
        for shape, tensor in zip(shapes, spec.inputs, strict=True)
    ]
    feeds = {
        tensor.name: (array.double() if tensor.dtype.is_float else array).cpu().numpy()
        for tensor, array in zip(spec.inputs, kept, strict=True)
    }
    stream = torch.cuda.Stream()

    def scratch(size: int) -> int:
        return value((size // 2,), "f16", lambda shape: torch.full(shape, float("nan"))).address

    host = PlayedRuntime(made.path, stream=stream.cuda_stream, scratch=scratch)
    (op,) = host.names(PROVIDER).values()
    outputs = outputs_of(spec)

    def allocate(index: int, shape: tuple[int, ...]) -> Value:
        return value(shape, str(outputs[index].dtype), lambda shape: torch.full(shape, float("nan")))

    torch.cuda.synchronize()
    host.run(op, host.create(op), inputs, allocate)
    stream.synchronize()
    arrays = {array.data_ptr(): array for array in kept}
    expected = evaluate(spec, feeds)
    for index, tensor in enumerate(outputs):
        result = arrays[host.values[host.outputs[index] - 1].address].double().cpu().numpy()
        error = np.linalg.norm(result - expected[tensor.name]) / np.linalg.norm(expected[tensor.name])
        narrow = any(one.value.dtype is BF16 for one in views_of(spec))  # so are the weights of an attention
        assert error < {"f32": 6e-3 if narrow else 1e-3, "f16": 1e-3, "bf16": 6e-3}[str(tensor.dtype)]
