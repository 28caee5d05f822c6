"""Finding, checking and loading the models of a folder, without a server."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import InferenceSession
from served_models import save_double, save_identity, save_pair

from runtime.server.compiling import Compiler
from runtime.server.control import Control
from runtime.server.errors import NotFoundError
from runtime.server.external_data import external_locations
from runtime.server.folders import RepositoryError
from runtime.server.loading import Loader
from runtime.server.model import ModelError
from runtime.server.repository import IndexEntry, Repository
from runtime.server.settings import DeclaredTensor, Every, Latest, Settings, SettingsError, Specific
from runtime.server.settings_files import read_settings
from runtime.wire import BY_WIRE


class CountingLoader:
    """A loader whose optimiser copies, and which counts how often it is asked to."""

    def __init__(self, cache: Path) -> None:
        self.optimized: list[Path] = []
        self.settings: list[Settings] = []
        self.loader = Loader(
            optimize=self._optimize, open_session=self._open, cache=cache, optimize_first=True, fingerprint="1"
        )

    def _optimize(self, model: Path, output: Path, settings: Settings) -> None:
        self.optimized.append(model)
        self.settings.append(settings)
        if model.parent.parent.name == "unfit":
            raise ModelError("a region of it cannot be compiled")
        shutil.copy(model, output)

    def _open(self, path: Path, settings: Settings, fused: bool) -> InferenceSession:
        return InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.fixture
def loading(tmp_path: Path) -> CountingLoader:
    return CountingLoader(tmp_path / "cache")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def load(root: Path, loading: CountingLoader) -> Repository:
    repository = Repository()
    control = Control(repository, root, loading.loader, on_change=lambda name: None)
    try:
        control.load_all()
    finally:
        control.stop()
    return repository


def save_versions(folder: Path, versions: Sequence[object]) -> None:
    for version in versions:
        save_double(folder / str(version) / "model.onnx")


def test_the_highest_number_is_served(root: Path, loading: CountingLoader) -> None:
    save_versions(root / "double", (1, 9, 10))
    repository = load(root, loading)
    assert repository.versions("double") == (10,)
    assert repository.find("double", "").version == 10
    assert repository.find("double", "10").version == 10
    with pytest.raises(NotFoundError, match="no version '9'; served: 10"):
        repository.find("double", "9")
    assert repository.index() == (IndexEntry("double", 10, "READY"),)


def test_only_whole_numbers_are_versions(root: Path, loading: CountingLoader) -> None:
    save_versions(root / "double", (2, "03", "0", "-1", "4.0", "x"))
    (root / "double" / "7").mkdir()
    assert load(root, loading).versions("double") == (2,)


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("all { }", (1, 2, 5)),
        ("latest { num_versions: 2 }", (2, 5)),
        ("latest { num_versions: 9 }", (1, 2, 5)),
        ("specific { versions: [2, 1] }", (1, 2)),
    ],
)
def test_version_policies(root: Path, loading: CountingLoader, policy: str, served: tuple[int, ...]) -> None:
    save_versions(root / "double", (1, 2, 5))
    (root / "double" / "config.pbtxt").write_text(f"version_policy {{ {policy} }}")
    assert load(root, loading).versions("double") == served


def test_a_version_that_is_asked_for_must_exist(root: Path, loading: CountingLoader) -> None:
    save_versions(root / "double", (1,))
    (root / "double" / "config.pbtxt").write_text("version_policy { specific { versions: 4 } }")
    with pytest.raises(RepositoryError, match="asks for version 4, but there are only"):
        load(root, loading)


def test_a_plain_model_is_optimised_once_per_content(root: Path, loading: CountingLoader) -> None:
    save_versions(root / "double", (1,))
    load(root, loading)
    load(root, loading)
    assert len(loading.optimized) == 1
    save_double(root / "double" / "1" / "model.onnx", factor=5.0)
    repository = load(root, loading)
    assert len(loading.optimized) == 2
    x = np.ones((1, 4), dtype=np.float32)
    assert np.asarray(repository.find("double", "").session.run(["y"], {"x": x})[0]).tolist() == [[5.0] * 4]
    leftovers = [path for path in (loading.loader.cache / "models").iterdir() if path.name.startswith(".")]
    assert not leftovers


def test_sessions_of_other_threads_have_kernels_of_their_own(root: Path, loading: CountingLoader) -> None:
    save_versions(root / "double", (1,))
    load(root, loading)
    for threads, times in (1, 2), (2, 3), (1, 3):
        (root / "double" / "tilefuse.toml").write_text(f"threads = {threads}\n")
        load(root, loading)
        assert len(loading.optimized) == times
    assert [settings.threads for settings in loading.settings] == [None, 1, 2]


def test_the_compiler_is_told_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def start(command: list[str], **named: object) -> None:
        commands.append(command)
        raise OSError("not here")

    monkeypatch.setattr("runtime.server.compiling.subprocess.Popen", start)
    for settings in Settings(), Settings(threads=3):
        with pytest.raises(OSError, match="not here"):
            Compiler().optimize(tmp_path / "in.onnx", tmp_path / "out.onnx", settings)
    assert [command[-2:] == ["--threads", "3"] for command in commands] == [False, True]


def test_optimising_can_be_switched_off(root: Path, loading: CountingLoader) -> None:
    save_versions(root / "double", (1,))
    (root / "double" / "tilefuse.toml").write_text("optimize = false\n")
    load(root, loading)
    assert not loading.optimized


def test_a_fused_model_is_loaded_as_it_is(root: Path, loading: CountingLoader) -> None:
    path = root / "double" / "1" / "model.onnx"
    save_double(path)
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("tilefuse", 1))
    onnx.save(model, path)
    load(root, loading)
    assert not loading.optimized


def test_failures_are_all_listed_and_leave_the_rest_loaded(root: Path, loading: CountingLoader) -> None:
    save_versions(root / "good", (1,))
    save_double(root / "unfit" / "1" / "model.onnx", factor=7.0)  # other content than good: not in the cache
    save_versions(root / "bad name", (1,))
    save_versions(root / "configured", (1,))
    (root / "configured" / "config.pbtxt").write_text('name: "other"')
    (root / "notes.txt").write_text("not a model")
    (root / ".git").mkdir()
    repository = Repository()
    control = Control(repository, root, loading.loader, on_change=lambda name: None)
    with pytest.raises(RepositoryError) as caught:
        control.load_all()
    control.stop()
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("bad name: a model's name has letters")
    assert "name is 'other', but only 'configured'" in lines[1]
    assert lines[2] == "unfit: version 1: a region of it cannot be compiled"
    assert repository.find("good", "").name == "good"
    assert not (loading.loader.cache / "models" / "unfit").exists()
    states = {entry.name: entry.state for entry in repository.index()}
    assert states.pop("good") == "READY"
    assert states == dict.fromkeys(("unfit", "bad name", "configured"), "UNAVAILABLE")


@pytest.mark.parametrize("name", ["", "..", ".", "../good", "good/1", "/etc", "good\0", "x" * 10_000])
def test_no_name_of_a_client_reaches_the_disk(root: Path, loading: CountingLoader, name: str) -> None:
    save_versions(root / "good", (1,))
    repository = load(root, loading)
    with pytest.raises(NotFoundError) as caught:
        repository.find(name, "")
    assert len(str(caught.value)) < 120


def test_links_out_of_the_repository_are_refused(root: Path, tmp_path: Path, loading: CountingLoader) -> None:
    save_double(tmp_path / "elsewhere" / "1" / "model.onnx")
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RepositoryError, match="leads out of the repository"):
        load(root, loading)


def test_a_library_linked_from_elsewhere_is_refused(root: Path, tmp_path: Path, loading: CountingLoader) -> None:
    save_versions(root / "double", (1,))
    (tmp_path / "other.so").write_bytes(b"")
    (root / "double" / "1" / "model.so").symlink_to(tmp_path / "other.so")
    with pytest.raises(RepositoryError, match=r"leads out of the repository, to .*other\.so"):
        load(root, loading)


def external_model(path: Path, location: str) -> None:
    """y = x + w, with w in a file at `location`."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value=location)
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "graph", value[:1], value[1:], [weight])
    path.parent.mkdir(parents=True, exist_ok=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("location", ["../weights.bin", "/etc/hostname", "sub/../../weights.bin", "link.bin"])
def test_external_data_outside_of_the_version_are_refused(root: Path, loading: CountingLoader, location: str) -> None:
    path = root / "double" / "1" / "model.onnx"
    external_model(path, location)
    np.ones(4, dtype=np.float32).tofile(root / "double" / "weights.bin")
    (path.parent / "link.bin").symlink_to(root / "double" / "weights.bin")
    with pytest.raises(RepositoryError, match="outside its folder"):
        load(root, loading)
    assert not loading.optimized


def test_external_data_are_part_of_the_content(root: Path, loading: CountingLoader) -> None:
    path = root / "double" / "1" / "model.onnx"
    external_model(path, "weights.bin")
    (root / "double" / "tilefuse.toml").write_text("optimize = false\n")
    np.full(4, 3, dtype=np.float32).tofile(path.parent / "weights.bin")
    session = load(root, loading).find("double", "").session
    assert np.asarray(session.run(None, {"x": np.zeros(4, dtype=np.float32)})[0]).tolist() == [3.0] * 4


def test_missing_external_data_are_named(root: Path, loading: CountingLoader) -> None:
    external_model(root / "double" / "1" / "model.onnx", "weights.bin")
    with pytest.raises(RepositoryError, match=r"cannot read .*weights\.bin"):
        load(root, loading)


def test_external_tensors_are_found_wherever_they_hide() -> None:
    def tensor(location: str) -> TensorProto:
        made = numpy_helper.from_array(np.zeros(1, dtype=np.float32))
        made.external_data.add(key="location", value=location)
        return made

    inner = helper.make_graph([], "inner", [], [], [tensor("subgraph")])
    node = helper.make_node("If", ["c"], ["y"], then_branch=inner, value=tensor("attribute"))
    node.attribute.append(helper.make_attribute("many", [tensor("list")]))
    outer = helper.make_graph([node], "outer", [], [], [tensor("initializer")])
    function = helper.make_function(
        "custom", "F", [], [], [helper.make_node("Constant", [], ["v"], value=tensor("function"))], []
    )
    model = helper.make_model(outer, functions=[function])
    assert set(external_locations(model)) == {"initializer", "subgraph", "attribute", "list", "function"}


def test_settings_of_an_empty_folder(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == Settings()


def test_settings_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text(
        f'name: "{tmp_path.name}" backend: "onnxruntime" platform: "onnxruntime_onnx" max_batch_size: 16 '
        'default_model_filename: "model.onnx" '
        'input [ { name: "ids" data_type: TYPE_INT64 dims: [-1] } ] '
        'output [ { name: "y" data_type: TYPE_FP32 dims: [-1, 384] } ]'
    )
    (tmp_path / "tilefuse.toml").write_text("threads = 2\nprovider = true\n")
    assert read_settings(tmp_path) == Settings(
        max_batch_size=16,
        inputs=(DeclaredTensor("ids", BY_WIRE["INT64"], (-1,)),),
        outputs=(DeclaredTensor("y", BY_WIRE["FP32"], (-1, 384)),),
        threads=2,
        provider=True,
        version_policy=Latest(1),
    )
    assert Every() != Specific((1,))


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("config.pbtxt", "dynamic_batching { }", "dynamic_batching needs a max_batch_size"),
        (
            "config.pbtxt",
            "max_batch_size: 4 dynamic_batching { preferred_batch_size: 5 }",
            "must be 1 to 4",
        ),
        (
            "config.pbtxt",
            "max_batch_size: 4 dynamic_batching { priority_levels: 2 default_priority_level: 3 }",
            "default_priority_level is 3, but it must be 1 to 2",
        ),
        (
            "config.pbtxt",
            "max_batch_size: 4 dynamic_batching { priority_queue_policy { key: 1 value { } } }",
            "names level 1, but priority_levels is 0",
        ),
        ("config.pbtxt", "instance_group { count: -1 }", "count is -1"),
        ("config.pbtxt", 'parameters { key: "intra_op_thread_count" value { string_value: "x" } }', "a whole number"),
        (
            "config.pbtxt",
            'model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_FP32 input_data_file: "../x" } } }',
            r"'\.\./x' is outside of warmup/",
        ),
        ("tilefuse.toml", "[padding]\ndim = 'n'\nbuckets = [8]\n", "padding needs mask"),
        ("tilefuse.toml", "[padding]\ndim = 'n'\nbuckets = [8, 4]\nmask = 'm'\n", "numbers above 0 that rise"),
        ("tilefuse.toml", "[padding]\ndim = 'n'\nbuckets = [8]\nmask = 'm'\nx = 1\n", "unknown key 'padding.x'"),
        ("tilefuse.toml", "[padding]\ndim = 'n'\nbuckets = [8]\nmask = 'm'\n", "needs a max_batch_size above 0"),
        ("tilefuse.toml", "instances = 0", "must be 1 or more"),
        ("config.pbtxt", "max_batch_size: many", "1:17"),
        ("config.pbtxt", "max_batch_size: -1", "must be 0 or more"),
        ("config.pbtxt", 'platform: "tensorrt_plan"', "platform is 'tensorrt_plan'"),
        ("config.pbtxt", 'default_model_filename: "../../x.onnx"', "must be a plain name"),
        ("config.pbtxt", 'input { name: "x" }', "needs both name and data_type"),
        ("config.pbtxt", 'input { name: "x" data_type: TYPE_FP32 dims: -2 }', "each must be -1, 0 or more"),
        ("config.pbtxt", "version_policy { latest { } }", "num_versions of 1 or more"),
        ("config.pbtxt", "version_policy { specific { } }", "lists no versions"),
        ("tilefuse.toml", "threads = ", "Invalid value"),
        (
            "tilefuse.toml",
            "thread = 2",
            "unknown key 'thread'; this server reads optimize, ",
        ),
        ("tilefuse.toml", "threads = true", "must be of type int"),
        ("tilefuse.toml", "threads = 0", "must be 1 or more"),
        ("tilefuse.toml", "optimize = 1", "must be of type bool"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(tmp_path: Path, file: str, text: str, reason: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(SettingsError, match=reason) as caught:
        read_settings(tmp_path)
    assert str(tmp_path / file) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('input { name: "z" data_type: TYPE_FP32 dims: [-1, 4] }', "declares 'z', but the model has x"),
        ('input { name: "x" data_type: TYPE_INT64 dims: [-1, 4] }', r"as INT64 \[-1, 4\], but the model has FP32"),
        ('input { name: "x" data_type: TYPE_FP32 dims: [-1, 5] }', r"but the model has FP32 \[-1, 4\]"),
        ('input { name: "x" data_type: TYPE_FP32 dims: 4 }', r"as FP32 \[4\], but the model has"),
        ('max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [-1, 4] }', r"as FP32 \[-1, -1, 4\]"),
    ],
)
def test_a_declaration_must_fit_the_model(root: Path, loading: CountingLoader, config: str, reason: str) -> None:
    save_versions(root / "double", (1,))
    (root / "double" / "config.pbtxt").write_text(config)
    with pytest.raises(RepositoryError, match=reason):
        load(root, loading)


def test_a_batch_needs_a_dynamic_first_dim(root: Path, loading: CountingLoader) -> None:
    external_model(root / "fixed" / "1" / "model.onnx", "weights.bin")
    np.ones(4, dtype=np.float32).tofile(root / "fixed" / "1" / "weights.bin")
    (root / "fixed" / "config.pbtxt").write_text("max_batch_size: 4")
    (root / "fixed" / "tilefuse.toml").write_text("optimize = false")
    with pytest.raises(RepositoryError, match="first dim of 'x' is not dynamic"):
        load(root, loading)


def test_declared_extents_narrow_dynamic_ones(root: Path, loading: CountingLoader) -> None:
    save_pair(root / "pair" / "1" / "model.onnx")
    (root / "pair" / "config.pbtxt").write_text('input { name: "a" data_type: TYPE_INT64 dims: [2, 3] }')
    model = load(root, loading).find("pair", "")
    assert [tensor.wire_shape for tensor in model.inputs] == [(2, 3), (-1, 3)]


def test_types_that_the_protocol_lacks_are_refused(root: Path, loading: CountingLoader) -> None:
    save_identity(root / "complex" / "1" / "model.onnx", TensorProto.FLOAT8E4M3FN)
    with pytest.raises(RepositoryError, match=r"'x' is a tensor\(float8e4m3fn\), which the protocol cannot carry"):
        load(root, loading)
