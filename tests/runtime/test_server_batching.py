"""Which requests run together, and that each gets its own answer whatever becomes of the others.

The scheduler is driven by threads over a model of the test's own, which says when it runs and when it may go on.
"""

import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from onnx import TensorProto, helper
from served_models import plain_loader, running, save_graph, save_lookup, save_slow, value

from proto import open_inference_pb2 as pb
from runtime.server.budget import Budget
from runtime.server.errors import AbandonedError, ExhaustedError, InvalidRequestError, TimedOutError
from runtime.server.scheduler import Entry, Feeds, Scheduler
from runtime.server.settings import Batching, QueuePolicy
from runtime.wire import Array


class Machine:
    """y = 10 x, held until the gate is open; x of 13 anywhere makes a run fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.started = threading.Semaphore(0)
        self.runs: list[list[float]] = []

    def execute(self, feeds: Feeds, outputs: tuple[str, ...]) -> list[Array]:
        x = feeds["x"]
        self.runs.append([float(row) for row in x.reshape(len(x), -1)[:, 0]])
        self.started.release()
        time.sleep(0.0005)
        assert self.gate.wait(30)
        if (x == 13).any():
            raise InvalidRequestError("13 is out of range")
        return [np.multiply(x, 10) for _ in outputs]


class Client:
    """Sends entries from threads of its own."""

    def __init__(self, batching: Batching | None = None, *, max_rows: int = 8, instances: int = 1) -> None:
        self.machine = Machine()
        self.scheduler = Scheduler(self.machine.execute, instances=instances, batching=batching, max_rows=max_rows)
        self._pool = ThreadPoolExecutor(32)

    def send(self, *rows: float, width: int = 2, **fields: Any) -> Future[list[Array]]:
        """Send an entry and return once it waits or runs."""
        x = np.repeat(np.array(rows, dtype=np.float32)[:, None], width, axis=1)
        fields.setdefault("wanted", lambda: True)
        entry = Entry({"x": x}, ("y",), rows=len(rows), group=width, **fields)
        waiting, runs = self.scheduler.waiting, len(self.machine.runs)
        future = self._pool.submit(self.scheduler.run, entry)
        until(lambda: self.scheduler.waiting > waiting or len(self.machine.runs) > runs or future.done())
        return future

    def occupy(self) -> Future[list[Array]]:
        """Keep the instance busy."""
        future = self.send(1)
        assert self.machine.started.acquire(timeout=10)
        return future

    def close(self) -> None:
        self.machine.gate.set()
        self._pool.shutdown()


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


@pytest.fixture
def client() -> Generator[Callable[..., Client]]:
    made: list[Client] = []

    def make(*arguments: Any, **named: Any) -> Client:
        made.append(Client(*arguments, **named))
        return made[-1]

    yield make
    for one in made:
        one.close()


def rows_of(future: "Future[list[Array]]") -> list[float]:
    return [float(row) for row in future.result(10)[0][:, 0]]


def test_a_lone_request_does_not_wait(client: Callable[..., Client]) -> None:
    alone = client(Batching(preferred=(8,), passed_over=5.0))
    alone.machine.gate.set()
    started = time.perf_counter()
    assert rows_of(alone.send(3)) == [30]
    assert time.perf_counter() - started < 1


def test_what_waits_runs_together_and_each_gets_its_own(client: Callable[..., Client]) -> None:
    many = client(Batching())
    first = many.occupy()
    others = [many.send(*range(10 * n, 10 * n + n)) for n in (1, 2, 3)]
    many.machine.gate.set()
    assert rows_of(first) == [10]
    assert [rows_of(future) for future in others] == [[100], [200, 210], [300, 310, 320]]
    assert many.machine.runs == [[1], [10, 20, 21, 30, 31, 32]]


def test_only_equal_shapes_run_together(client: Callable[..., Client]) -> None:
    many = client(Batching())
    many.occupy()
    futures = [many.send(n, width=width) for n, width in ((2, 2), (3, 5), (4, 2), (5, 5))]
    many.machine.gate.set()
    assert [rows_of(future) for future in futures] == [[20], [30], [40], [50]]
    assert [future.result()[0].shape[1] for future in futures] == [2, 5, 2, 5]
    assert many.machine.runs == [[1], [2, 4], [3, 5]]


def test_a_batch_has_no_more_rows_than_it_may(client: Callable[..., Client]) -> None:
    many = client(Batching(), max_rows=4)
    many.occupy()
    futures = [many.send(*[n] * rows) for n, rows in ((2, 3), (3, 2), (4, 1), (5, 4))]
    many.machine.gate.set()
    for future in futures:
        future.result(10)
    assert many.machine.runs == [[1], [2, 2, 2, 4], [3, 3], [5, 5, 5, 5]]


def test_without_batching_every_request_runs_alone(client: Callable[..., Client]) -> None:
    alone = client(None)
    alone.occupy()
    futures = [alone.send(n) for n in (2, 3)]
    alone.machine.gate.set()
    assert [rows_of(future) for future in futures] == [[20], [30]]
    assert alone.machine.runs == [[1], [2], [3]]


def test_instances_bound_what_runs_at_once(client: Callable[..., Client]) -> None:
    two = client(None, instances=2)
    futures = [two.send(n) for n in (1, 2, 3)]
    assert len(two.machine.runs) == 2
    assert two.scheduler.waiting == 1
    two.machine.gate.set()
    assert [rows_of(future) for future in futures] == [[10], [20], [30]]


def test_a_bad_request_spoils_no_other(client: Callable[..., Client]) -> None:
    many = client(Batching())
    many.occupy()
    futures = [many.send(n) for n in (2, 13, 3)]
    many.machine.gate.set()
    assert rows_of(futures[0]) == [20]
    assert rows_of(futures[2]) == [30]
    with pytest.raises(InvalidRequestError, match="out of range"):
        futures[1].result(10)
    assert rows_of(many.send(4)) == [40]


def test_a_model_that_loses_rows_is_run_one_by_one(
    client: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    many = client(Batching())

    def lose_rows(feeds: Feeds, outputs: tuple[str, ...]) -> list[Array]:
        return [array[:1] for array in many.machine.execute(feeds, outputs)]

    many.scheduler = Scheduler(lose_rows, instances=1, batching=Batching(), max_rows=8)
    many.occupy()
    futures = [many.send(n) for n in (2, 3)]
    many.machine.gate.set()
    assert [rows_of(future) for future in futures] == [[20], [30]]
    assert "has 1 rows for a batch of 2" in caplog.text


def test_preferred_sizes_are_formed(client: Callable[..., Client]) -> None:
    many = client(Batching(preferred=(2, 4)))
    many.occupy()
    futures = [many.send(n) for n in (2, 3, 4, 5, 6, 7, 8)]
    many.machine.gate.set()
    for future in futures:
        future.result(10)
    assert many.machine.runs == [[1], [2, 3, 4, 5], [6, 7], [8]]


@pytest.mark.parametrize(("delay", "order"), [(60.0, [[1], [3, 4], [2]]), (0.0, [[1], [2], [3, 4]])])
def test_the_delay_bounds_how_long_the_oldest_is_passed_over(
    client: Callable[..., Client], delay: float, order: list[list[float]]
) -> None:
    many = client(Batching(preferred=(2,), passed_over=delay))
    many.occupy()
    futures = [many.send(2, width=7), many.send(3), many.send(4)]
    many.machine.gate.set()
    for future in futures:
        future.result(10)
    assert many.machine.runs == order


def test_higher_priorities_run_first(client: Callable[..., Client]) -> None:
    many = client(Batching(priorities=3, default_priority=2), max_rows=1)
    many.occupy()
    futures = [many.send(n, priority=level) for n, level in ((5, 3), (4, 0), (3, 2), (2, 1))]
    many.machine.gate.set()
    for future in futures:
        future.result(10)
    assert many.machine.runs == [[1], [2], [4], [3], [5]]


def test_the_queue_is_as_long_as_it_may_be(client: Callable[..., Client]) -> None:
    many = client(Batching(policy=QueuePolicy(largest=3)))
    many.occupy()
    futures = [many.send(n) for n in (2, 3, 4)]
    for _ in range(3):
        with pytest.raises(ExhaustedError, match="max_queue_size 3"):
            many.send(5).result(10)
    many.machine.gate.set()
    assert [rows_of(future) for future in futures] == [[20], [30], [40]]
    assert rows_of(many.send(6)) == [60]


def test_each_priority_has_its_own_policy(client: Callable[..., Client]) -> None:
    policies = ((1, QueuePolicy(largest=1)),)
    many = client(Batching(priorities=2, default_priority=2, policies=policies))
    many.occupy()
    many.send(2, priority=1)
    with pytest.raises(ExhaustedError):
        many.send(3, priority=1).result(10)
    many.send(4)
    assert many.scheduler.waiting == 2


def test_levels_without_a_policy_of_their_own_have_queues_of_their_own(client: Callable[..., Client]) -> None:
    many = client(Batching(priorities=2, default_priority=2, policy=QueuePolicy(largest=1)))
    many.occupy()
    many.send(2, priority=1)
    many.send(3, priority=2)
    assert many.scheduler.waiting == 2
    for level in (1, 2):
        with pytest.raises(ExhaustedError):
            many.send(4, priority=level).result(10)


def test_a_late_request_goes_before_those_of_lower_levels(client: Callable[..., Client]) -> None:
    policies = ((1, QueuePolicy(timeout=0.1, delay=True)),)
    many = client(Batching(priorities=2, default_priority=2, policies=policies), max_rows=1)
    many.occupy()
    low = many.send(4, priority=2)
    late = many.send(2, priority=1)
    time.sleep(0.3)
    early = many.send(3, priority=1)
    many.machine.gate.set()
    for future in (low, late, early):
        future.result(10)
    assert many.machine.runs == [[1], [3], [2], [4]]


def test_a_timeout_fires_while_a_model_runs(client: Callable[..., Client]) -> None:
    many = client(Batching(policy=QueuePolicy(timeout=0.2)))
    many.occupy()
    started = time.monotonic()
    late = many.send(2)
    with pytest.raises(TimedOutError, match="longer than its queue's timeout"):
        late.result(10)
    assert 0.15 < time.monotonic() - started < 2
    many.machine.gate.set()
    assert rows_of(many.send(3)) == [30]
    assert [2] not in many.machine.runs


def test_a_timeout_can_mean_to_wait_behind_the_others(client: Callable[..., Client]) -> None:
    many = client(Batching(policy=QueuePolicy(timeout=0.1, delay=True)), max_rows=1)
    many.occupy()
    late = many.send(2)
    time.sleep(0.3)
    early = many.send(3)
    many.machine.gate.set()
    assert (rows_of(early), rows_of(late)) == ([30], [20])
    assert many.machine.runs == [[1], [3], [2]]


@pytest.mark.parametrize(("override", "raises"), [(True, True), (False, False)])
def test_a_request_may_shorten_its_timeout_if_that_is_allowed(
    client: Callable[..., Client], override: bool, raises: bool
) -> None:
    many = client(Batching(policy=QueuePolicy(timeout=30.0, override=override)))
    many.occupy()
    future = many.send(2, timeout=0.1)
    time.sleep(0.4)
    assert future.done() is raises
    many.machine.gate.set()
    if raises:
        with pytest.raises(TimedOutError):
            future.result(10)
    else:
        assert rows_of(future) == [20]


def test_cancelled_requests_are_dropped_and_hold_nobody_up(client: Callable[..., Client]) -> None:
    many = client(Batching())
    many.occupy()
    wanted = threading.Event()
    wanted.set()
    calls: list[Callable[[], None]] = []
    gone = many.send(2, wanted=wanted.is_set, notify=calls.append)
    silent = many.send(3, wanted=wanted.is_set)  # nobody says when this one is cancelled
    stays = many.send(4)
    wanted.clear()
    calls[0]()
    with pytest.raises(AbandonedError):
        gone.result(10)  # at once, though the model still runs
    many.machine.gate.set()
    assert rows_of(stays) == [40]
    with pytest.raises(AbandonedError):
        silent.result(10)
    assert many.machine.runs == [[1], [4]]


def test_many_threads_get_their_own_rows(client: Callable[..., Client]) -> None:
    many = client(Batching())
    many.machine.gate.set()
    failures: list[str] = []

    def ask(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(60):
            rows, width = int(random.integers(1, 5)), int(random.integers(1, 4))
            x = random.integers(20, 10_000, (rows, width)).astype(np.float32)
            if random.random() < 0.05:
                x[0, 0] = 13
            wanted = random.random() < 0.95
            entry = Entry({"x": x}, ("y",), lambda wanted=wanted: wanted, rows=rows, group=width)
            try:
                results = many.scheduler.run(entry)
            except (InvalidRequestError, AbandonedError):
                continue
            if not np.array_equal(results[0], x * 10):
                failures.append(f"{x.tolist()} gave {results[0].tolist()}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert not failures
    assert many.scheduler.waiting == 0
    assert max(len(run) for run in many.machine.runs) > 4  # of at most 4 rows each: some ran together


# Over gRPC


def save_masked_mean(path: Path) -> None:
    """Per row the mean of `ids` where `mask` is 1, and the doubled ids: an output with the padded dim, one without."""
    nodes = [
        helper.make_node("Cast", ["ids"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["mask"], ["weights"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["floats", "weights"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "axis"], ["sum"], keepdims=0),
        helper.make_node("ReduceSum", ["weights", "axis"], ["count"], keepdims=0),
        helper.make_node("Div", ["sum", "count"], ["mean"]),
        helper.make_node("Add", ["ids", "ids"], ["twice"]),
    ]
    shape = ["batch", "length"]
    save_graph(
        path,
        nodes,
        [value("ids", TensorProto.INT64, shape), value("mask", TensorProto.INT64, shape)],
        [value("mean", TensorProto.FLOAT, ["batch"]), value("twice", TensorProto.INT64, shape)],
        weights=[helper.make_tensor("axis", TensorProto.INT64, [1], [1])],
    )


def ragged_call(stub: Any, ids: np.ndarray[Any, Any], **fields: Any) -> pb.ModelInferResponse:
    request = pb.ModelInferRequest(model_name="mean", **fields)
    for name, array in (("ids", ids), ("mask", np.ones_like(ids))):
        request.inputs.add(name=name, datatype="INT64", shape=ids.shape)
        request.raw_input_contents.append(array.tobytes())
    return stub.ModelInfer(request)


PADDED = "optimize = false\n[padding]\ndim = 'length'\nbuckets = [4, 8, 16]\nmask = 'mask'\nvalues = { ids = 99 }\n"


def test_padded_requests_are_batched_and_trimmed(tmp_path: Path) -> None:
    """Variable lengths, many clients: each gets its own values, as long as what it sent."""
    root = tmp_path / "models"
    save_masked_mean(root / "mean" / "1" / "model.onnx")
    (root / "mean" / "config.pbtxt").write_text("max_batch_size: 8 dynamic_batching { }")
    (root / "mean" / "tilefuse.toml").write_text(PADDED)
    with running(root, plain_loader(tmp_path / "cache")) as (server, stub):

        def ask(seed: int) -> None:
            random = np.random.default_rng(seed)
            for _ in range(25):
                ids = random.integers(0, 1000, (int(random.integers(1, 4)), int(random.integers(1, 17))))
                answer = ragged_call(stub, ids)
                mean = np.frombuffer(answer.raw_output_contents[0], dtype=np.float32)
                np.testing.assert_allclose(mean, ids.mean(axis=1), rtol=1e-5)
                assert list(answer.outputs[1].shape) == list(ids.shape)
                twice = np.frombuffer(answer.raw_output_contents[1], dtype=np.int64).reshape(ids.shape)
                assert np.array_equal(twice, ids * 2)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(8)))
        with pytest.raises(grpc.RpcError) as caught:
            ragged_call(stub, np.zeros((1, 17), dtype=np.int64))
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "takes at most 16" in error.details()
        totals = server.repository.find("mean", "").statistics.totals()
        assert totals.success == 200
        assert totals.executions <= totals.success
        batches = stub.ModelStatistics(pb.ModelStatisticsRequest(name="mean")).model_stats[0]
        assert sum(entry.compute_infer.count for entry in batches.batch_stats) == batches.execution_count


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (
            "dim = 'length'\nbuckets = [4]\nmask = 'ids2'",
            "mask 'ids2', but the inputs with that dim are ids, mask",
        ),
        ("dim = 'seq'\nbuckets = [4]\nmask = 'mask'", "the inputs with that dim are none"),
        ("dim = 'length'\nbuckets = [4]\nmask = 'mask'\nvalues = { x = 1 }", "no input of that name"),
    ],
)
def test_padding_must_fit_the_model(tmp_path: Path, table: str, reason: str) -> None:
    root = tmp_path / "models"
    save_masked_mean(root / "mean" / "1" / "model.onnx")
    (root / "mean" / "config.pbtxt").write_text("max_batch_size: 8")
    (root / "mean" / "tilefuse.toml").write_text(f"optimize = false\n[padding]\n{table}\n")
    with running(root, plain_loader(tmp_path / "cache"), control_mode="explicit") as (_, stub):
        with pytest.raises(grpc.RpcError) as caught:
            stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="mean"))
        error: Any = caught.value
        assert reason in error.details()


def test_rows_must_agree_and_priorities_exist(tmp_path: Path) -> None:
    root = tmp_path / "models"
    save_masked_mean(root / "mean" / "1" / "model.onnx")
    (root / "mean" / "config.pbtxt").write_text(
        "max_batch_size: 8 dynamic_batching { priority_levels: 2 default_priority_level: 1 }"
    )
    (root / "mean" / "tilefuse.toml").write_text("optimize = false\n")
    with running(root, plain_loader(tmp_path / "cache")) as (_, stub):
        ids = np.ones((2, 3), dtype=np.int64)
        config = stub.ModelConfig(pb.ModelConfigRequest(name="mean")).config
        assert config.dynamic_batching.priority_levels == 2
        for level, code in ((1, None), (2, None), (3, grpc.StatusCode.INVALID_ARGUMENT)):
            parameters = {"priority": pb.InferParameter(uint64_param=level)}
            if code is None:
                assert ragged_call(stub, ids, parameters=parameters).model_name == "mean"
                continue
            with pytest.raises(grpc.RpcError) as caught:
                ragged_call(stub, ids, parameters=parameters)
            error: Any = caught.value
            assert (error.code(), error.details()) == (
                code,
                "parameter 'priority' is 3, but the model has levels 1 to 2",
            )


def test_an_id_out_of_range_fails_alone(tmp_path: Path) -> None:
    """The model itself fails on one request of a batch; the others are answered."""
    root = tmp_path / "models"
    save_lookup(root / "lookup" / "1" / "model.onnx")
    (root / "lookup" / "config.pbtxt").write_text("max_batch_size: 16 dynamic_batching { }")
    (root / "lookup" / "tilefuse.toml").write_text("optimize = false\n")
    with running(root, plain_loader(tmp_path / "cache")) as (_, stub):

        def ask(number: int) -> list[float] | str:
            request = pb.ModelInferRequest(model_name="lookup")
            request.inputs.add(name="ids", datatype="INT64", shape=[1])
            request.raw_input_contents.append(np.int64(number).tobytes())
            try:
                return np.frombuffer(stub.ModelInfer(request).raw_output_contents[0], dtype=np.float32).tolist()
            except grpc.RpcError as error:
                failed: Any = error
                return failed.code().name

        numbers = [n % 12 for n in range(240)]
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(ask, numbers))
    assert answers == [[2.0 * n, 2.0 * n + 1] if n < 10 else "INVALID_ARGUMENT" for n in numbers]


def test_bytes_in_flight_are_bounded(tmp_path: Path) -> None:
    root = tmp_path / "models"
    save_slow(root / "slow" / "1" / "model.onnx")
    (root / "slow" / "tilefuse.toml").write_text("optimize = false\n")
    request = pb.ModelInferRequest(model_name="slow", id="i" * 900)
    request.inputs.add(name="x", datatype="FP32", shape=[1])
    request.inputs.add(name="steps", datatype="INT64", shape=[])
    request.raw_input_contents.extend([np.float32(7).tobytes(), np.int64(3000).tobytes()])
    with running(root, plain_loader(tmp_path / "cache"), in_flight_bytes=1000) as (server, stub):
        first = stub.ModelInfer.future(request)
        until(lambda: server.repository.find("slow", "").usage.count == 1)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "try again later" in error.details()
        assert first.result(timeout=60).id == request.id
        assert stub.ModelInfer(request).id == request.id  # what was taken was given back


def test_a_request_above_the_budget_runs_if_it_is_alone() -> None:
    budget = Budget(10)
    budget.take(50)
    with pytest.raises(ExhaustedError):
        budget.take(0)
    budget.give_back(50)
    budget.take(4)
    budget.take(6)
    assert (budget.bytes, budget.requests) == (10, 2)
