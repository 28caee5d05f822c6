"""`load` and the custom-op library, over hand-written kernels: results, shapes, threads and every refusal."""

import ctypes
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import native_build
import native_models
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from runtime import session as session_module
from runtime.session import LoadError, load

pytestmark = pytest.mark.cpu

PROVIDER = "TileFuseExecutionProvider"
SIZES = [(5, 7), (1, 1), (300, 129), (0, 4), (2, 1024)]


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    ort.set_default_logger_severity(4)  # refusals are provoked on purpose


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native_build.build_library(tmp_path_factory.mktemp("library") / "hand.so")


@pytest.fixture
def sampler(tmp_path: Path, library: Path) -> Path:
    shutil.copy(library, tmp_path / "sampler.so")
    return native_models.write_sampler(tmp_path / "sampler.onnx")


def count(library: Path, counter: str) -> int:
    """Return the count that the loaded `library` keeps under the name `counter`."""
    function = getattr(ctypes.CDLL(str(library)), counter)
    function.restype = ctypes.c_longlong
    return function()


def check_run(session: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> None:
    expected = native_models.expect_sample(feeds)
    names = [output.name for output in session.get_outputs()]
    for name, output in zip(names, session.run(None, feeds), strict=True):
        found = np.asarray(output)
        np.testing.assert_allclose(found, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
        assert found.shape == expected[name].shape


@pytest.mark.parametrize("provider", [False, True])
def test_kernels_give_the_numbers_of_the_function_bodies(sampler: Path, provider: bool) -> None:
    fused = load(sampler, provider=provider)
    plain = ort.InferenceSession(str(sampler), providers=["CPUExecutionProvider"])
    for n, m in SIZES:
        feeds = native_models.sample_feeds(n, m)
        before = count(sampler.with_suffix(".so"), "hand_calls")
        check_run(plain, feeds)
        assert count(sampler.with_suffix(".so"), "hand_calls") == before
        check_run(fused, feeds)
        assert count(sampler.with_suffix(".so"), "hand_calls") > before


@pytest.mark.parametrize("provider", [False, True])
def test_output_dims_carry_the_symbols_of_the_inputs(sampler: Path, provider: bool) -> None:
    dims = {output.name: output.shape for output in load(sampler, provider=provider).get_outputs()}
    fourfold = dims.pop("fourfold")
    assert dims == {"mean": ["n", 1], "rest": ["n", "m"], "triple": ["q", 3]}
    assert len(fourfold) == 1
    assert fourfold[0] not in {"p", "n", -1}, "a computed dim must not equal another"


def test_dim_names_of_the_model_win_over_unknown_ones(sampler: Path) -> None:
    model = onnx.load(str(sampler))
    model.graph.output[2].type.tensor_type.shape.dim[0].dim_param = "length"
    onnx.save(model, str(sampler))
    assert load(sampler).get_outputs()[2].shape == ["length"]


@pytest.mark.parametrize("provider", [False, True])
def test_wrong_shape_is_refused_with_op_input_and_dims(sampler: Path, provider: bool) -> None:
    session = load(sampler, provider=provider)
    feeds = native_models.sample_feeds(4, 7)
    with pytest.raises(Exception, match="ScaleAdd_0a: input 1 dim 0 is 3, expected 7") as raised:
        session.run(None, {**feeds, "s": feeds["s"][:3]})
    assert type(raised.value).__name__ == "InvalidArgument"
    check_run(session, feeds)


@pytest.mark.parametrize("provider", [False, True])
def test_many_threads_share_one_session(sampler: Path, provider: bool) -> None:
    session = load(sampler, provider=provider, threads=2)

    def run(seed: int) -> None:
        check_run(session, native_models.sample_feeds(50 + 37 * seed, 600 - 45 * seed, seed=seed))

    with ThreadPoolExecutor(8) as pool:
        for job in [pool.submit(run, seed % 12) for seed in range(48)]:
            job.result()


def test_copies_of_a_group_outlive_a_chunk_but_not_a_call(tmp_path: Path, library: Path) -> None:
    mine = Path(shutil.copy(library, tmp_path / "first.so"))
    session = load(native_models.write_add_first(tmp_path / "first.onnx"), threads=1)
    random = np.random.default_rng(0)
    for _ in range(3):
        x = random.standard_normal((3, 4, 5), dtype=np.float32)
        calls, copies = count(mine, "hand_calls"), count(mine, "hand_copies")
        np.testing.assert_array_equal(np.asarray(session.run(None, {"x": x})[0]), x + x[:, :1])
        assert count(mine, "hand_calls") - calls > 3
        assert count(mine, "hand_copies") - copies == 3


@pytest.mark.parametrize("provider", [False, True])
def test_threads_do_not_take_copies_of_other_calls(tmp_path: Path, library: Path, provider: bool) -> None:
    shutil.copy(library, tmp_path / "first.so")
    session = load(native_models.write_add_first(tmp_path / "first.onnx"), provider=provider, threads=3)

    def run(seed: int) -> None:
        x = np.random.default_rng(seed).standard_normal((1 + seed % 7, 4, 129), dtype=np.float32)
        np.testing.assert_array_equal(np.asarray(session.run(None, {"x": x})[0]), x + x[:, :1])

    with ThreadPoolExecutor(8) as pool:
        for job in [pool.submit(run, seed) for seed in range(200)]:
            job.result()


def test_scratch_that_no_machine_has_is_an_error(tmp_path: Path, library: Path) -> None:
    shutil.copy(library, tmp_path / "hungry.so")
    session = load(native_models.write_chain(tmp_path / "hungry.onnx", 1, op="Hungry_0e"))
    with pytest.raises(Exception, match="Hungry_0e: no memory for 1152921504606846976 bytes of scratch"):
        session.run(None, {"x": np.ones((2, 3), np.float32), "s": np.ones(3, np.float32)})


def test_provider_is_assigned_every_fused_node(sampler: Path) -> None:
    for _ in range(2):  # the second load finds the library registered
        session = load(sampler, provider=True)
        assigned = {
            node.op_type: part.ep_name
            for part in session.get_provider_graph_assignment_info()
            for node in part.get_nodes()
        }
        assert assigned == dict.fromkeys(["ScaleAdd_0a", "MeanSplit_0b", "Repeat_0c", "Triple_0d"], PROVIDER)
    paths = [d.ep_metadata.get("library_path") for d in ort.get_ep_devices() if d.ep_name == PROVIDER]
    assert paths.count(str(sampler.with_suffix(".so"))) == 1


def test_two_providers_live_in_one_process(tmp_path: Path, library: Path) -> None:
    sessions: list[ort.InferenceSession] = []
    for name in ("left", "right"):
        shutil.copy(library, tmp_path / f"{name}.so")
        sessions.append(load(native_models.write_sampler(tmp_path / f"{name}.onnx"), provider=True))
    for session in sessions:
        check_run(session, native_models.sample_feeds(6, 5))
    assert count(tmp_path / "left.so", "hand_calls") > 0
    assert count(tmp_path / "right.so", "hand_calls") > 0


def test_provider_registers_once_under_concurrent_loads(sampler: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        sessions = list(pool.map(lambda _: load(sampler, provider=True), range(4)))
    for session in sessions:
        check_run(session, native_models.sample_feeds(3, 4))


def test_provider_needs_a_recent_onnxruntime(sampler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module.ort, "__version__", "1.22.1")
    with pytest.raises(LoadError, match=r"needs onnxruntime 1\.24 or newer, found 1\.22\.1.*custom ops"):
        load(sampler, provider=True)


def test_missing_model_and_missing_library_are_told_apart(sampler: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"other\.onnx: no such model"):
        load(tmp_path / "other.onnx")
    sampler.with_suffix(".so").unlink()
    with pytest.raises(FileNotFoundError, match=r"sampler.so.*tilefuse optimize.*plain onnxruntime"):
        load(sampler)


def test_a_model_without_fused_nodes_is_no_fused_model(tmp_path: Path) -> None:
    """Nobody is sent to look for a library that never was."""
    onnx.save(onnx.parser.parse_model('<ir_version: 9, opset_import: ["": 18]> g (float[n] x) => (float[n] y) '
                                      "{ y = Relu(x) }"), tmp_path / "plain.onnx")  # fmt: skip
    with pytest.raises(LoadError, match=r"plain\.onnx: not a fused model, it has no kernels: `tilefuse optimize`"):
        load(tmp_path / "plain.onnx")


def test_thread_counts_below_one_are_refused(sampler: Path) -> None:
    with pytest.raises(ValueError, match="threads is 0, expected at least 1"):
        load(sampler, threads=0)


def test_library_of_another_model_is_refused(tmp_path: Path) -> None:
    native_build.build_library(tmp_path / "sampler.so", flags=["-DHAND_EMPTY"])
    model = native_models.write_sampler(tmp_path / "sampler.onnx")
    with pytest.raises(LoadError, match="has no kernel MeanSplit_0b, Repeat_0c, ScaleAdd_0a, Triple_0d"):
        load(model)


def test_files_that_are_no_library_are_refused(sampler: Path, tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("not ELF")
    sampler.rename(tmp_path / "text.onnx")
    with pytest.raises(LoadError, match=r"text.so: cannot be loaded"):
        load(tmp_path / "text.onnx")


@pytest.mark.parametrize("provider", [False, True])
def test_rewritten_library_replaces_the_loaded_one(tmp_path: Path, library: Path, provider: bool) -> None:
    target = native_build.build_library(tmp_path / "sampler.so", flags=["-DHAND_EMPTY"])
    model = native_models.write_sampler(tmp_path / "sampler.onnx")
    with pytest.raises(LoadError, match="has no kernel"):
        load(model, provider=provider)
    shutil.copy(library, tmp_path / "new.so")
    os.replace(tmp_path / "new.so", target)
    for _ in range(2):
        check_run(load(model, provider=provider), native_models.sample_feeds(3, 4))


def test_linked_model_finds_the_library_beside_the_link(sampler: Path, tmp_path: Path) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / "linked.onnx").symlink_to(sampler)
    (folder / "linked.so").symlink_to(sampler.with_suffix(".so"))
    check_run(load(folder / "linked.onnx"), native_models.sample_feeds(3, 4))


def test_unsupported_processor_is_an_error_of_load_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = native_build.build_library(tmp_path / "sampler.so", flags=["-DHAND_UNSUPPORTED"])
    model = native_models.write_sampler(tmp_path / "sampler.onnx")
    with pytest.raises(LoadError, match=r"processor lacks the instructions.*function bodies"):
        load(model)
    for _ in range(2):
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(target))
        check_run(ort.InferenceSession(str(model), options), native_models.sample_feeds(3, 4))
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tilefuse:")]
    assert warnings == [
        "tilefuse: this processor lacks imaginary, the least that the library was built for; "
        "the model runs through its function bodies, unfused"
    ]


def test_empty_library_loads(tmp_path: Path) -> None:
    target = native_build.build_library(tmp_path / "empty.so", flags=["-DHAND_EMPTY"])
    model = native_models.write_sampler(tmp_path / "empty.onnx")
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(target))
    check_run(ort.InferenceSession(str(model), options), native_models.sample_feeds(3, 4))


def test_library_shows_its_entry_points_only(library: Path) -> None:
    loaded = ctypes.CDLL(str(library))
    for name in ("RegisterCustomOps", "CreateEpFactories", "ReleaseEpFactory", "TileFuseVariant"):
        assert hasattr(loaded, name)
    for name in ("tile_call_kernel", "tile_ops_for", "tile_generated_library"):
        assert not hasattr(loaded, name)


def test_library_builds_with_ziglang(tmp_path: Path) -> None:
    native_build.build_library(tmp_path / "sampler.so", compiler=native_build.ZIG)
    session = load(native_models.write_sampler(tmp_path / "sampler.onnx"))
    check_run(session, native_models.sample_feeds(30, 40))
    assert count(tmp_path / "sampler.so", "hand_calls") > 0
