"""Random regions on the CUDA backend: each is a kernel or is refused with a reason, by Python and never by NVRTC; what
is built does not spill; on a card results are those of float64. `--specs N` takes more than the suite's few, from the
seed that `--first-program` names.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from card_emulator import TYPES, emulate
from cuda_specs import BF16, F16, F32
from random_specs import RandomSpec, random_spec
from region_arrays import drawn, faults, in_float64, poisoned, shape_of, tolerance_of

from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import Evaluator, evaluate
from tilecore.contract.spec import ScanSpec, Spec, Tensor, check, outputs_of
from tilecore.cuda.adapt import SIZES, Adapted, adaptations
from tilecore.cuda.compile import CudaKernel, CudaSource, build, candidates, first_made, write
from tilecore.cuda.emit_launch import check_maps
from tilecore.cuda.errors import CudaError
from tilecore.cuda.kernel import KernelPlan
from tilecore.cuda.launch import Launcher
from tilecore.cuda.nvrtc import load_nvrtc
from tilecore.cuda.profile import A100, H100, GpuProfile
from tilecore.cuda.recommend import Choice
from tilecore.cuda.row_plan import RowPlan

SMALL = 200_000  # elements of a region that is emulated
Make = Callable[[CudaSource], Any]


def ways(spec: Spec, *, adapted: bool) -> Iterator[Adapted]:
    """The region as it is, or as the fuser's regions are run."""
    if not adapted:
        yield Adapted((), (), spec)
        return
    yield from adaptations(spec)


def made(spec: Spec, profile: GpuProfile, make: Make, *, adapted: bool) -> tuple[Adapted, list[Any]]:
    """The first way to run `spec` whose programs `make` all takes. CudaError with the first reason."""

    def one(program: Spec) -> Any:
        def written(choice: Choice) -> Any:
            source = write(program, choice, label="Fuzz", profile=profile)
            if adapted:  # arrays are dense, as ONNX Runtime's are
                check_maps(source.plan)
            return make(source)

        return first_made(candidates(program, profile), written)

    reasons: list[CudaError] = []
    try:
        for way in ways(spec, adapted=adapted):
            try:
                return way, [one(program) for program in (*way.before, way.spec)]
            except CudaError as error:
                reasons.append(error)
    except CudaError as error:
        reasons.append(error)
    raise reasons[0]


def check_reason(error: CudaError) -> None:
    """A refusal says something, and not what a compiler of C++ has to say."""
    assert len(str(error)) > 15
    assert "NVRTC" not in str(error), str(error)


@pytest.fixture(scope="module")
def seeds(request: pytest.FixtureRequest) -> range:
    first, count = (int(str(request.config.getoption(name))) for name in ("--first-program", "--specs"))
    return range(first, first + count)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("huge", [False, True])
def test_random_regions_are_written_or_refused_with_a_reason(seeds: range, huge: bool) -> None:
    written = 0
    for seed in seeds:
        found = random_spec(seed, huge=huge)
        check(found.spec)
        for profile in (H100, A100):
            for adapted in (False, True):
                try:
                    _, sources = made(found.spec, profile, lambda source: source, adapted=adapted)
                except CudaError as error:
                    check_reason(error)
                    continue
                written += 1
                for source in sources:
                    assert "__global__" in source.text
                    assert source.plan.shared_bytes <= profile.shared_bytes
    assert written > len(seeds)


@pytest.mark.cpu
@pytest.mark.timeout(7200)
def test_random_regions_are_built_or_refused_with_a_reason(seeds: range, object_cache: Path) -> None:
    """Spills and serialised products of one candidate are no fault where another one is built."""
    try:
        load_nvrtc()
    except CudaError as error:
        pytest.skip(str(error))
    built = 0
    for seed in seeds[:: max(1, min(5, len(seeds) // 8))]:
        profile, refused = (H100, A100)[seed % 2], list[CudaError]()

        def make(source: CudaSource, refused: list[CudaError] = refused) -> CudaKernel:
            try:
                return build(source, object_cache)
            except CudaError as said:
                refused.append(said)
                raise

        try:
            _, kernels = made(random_spec(seed).spec, profile, make, adapted=seed % 3 > 0)
        except CudaError as error:
            refused.append(error)
        else:
            built += 1
            assert all(kernel.cubin.report.spills == 0 for kernel in kernels)
        for error in refused:
            check_reason(error)
    assert built


def block_count(plan: KernelPlan | RowPlan, sizes: dict[str, int]) -> int:
    """Blocks of an emulated launch: all of a program over rows, else two, which take the tiles in turns."""
    if isinstance(plan, KernelPlan):
        return 2
    return math.prod(int(Evaluator({}, sizes)(axis.extent)) for axis in plan.task_axes if axis.extent is not None)


@pytest.mark.cpu
@pytest.mark.timeout(7200)
def test_random_regions_are_right_on_an_emulated_card(seeds: range, object_cache: Path) -> None:
    """Kernels for sm_80, run by fibers on the processor; large ones are left to cards."""
    right, wrong = 0, list[str]()
    for seed in seeds[:: max(1, min(3, len(seeds) // 8))]:
        found = random_spec(seed)
        spec, sizes, rng = found.spec, found.sizes, np.random.default_rng(seed)
        try:
            way, sources = made(spec, A100, lambda source: source, adapted=seed % 3 > 0)
        except CudaError:
            continue
        results = (*outputs_of(spec), *way.scratch)
        if sum(math.prod(shape_of(one, sizes)) for one in (*spec.inputs, *results)) > SMALL:
            continue
        arrays = {one.name: drawn(one, shape_of(one, sizes), rng).astype(TYPES[one.dtype]) for one in spec.inputs}
        arrays |= {one.name: poisoned(one, shape_of(one, sizes)).astype(TYPES[one.dtype]) for one in results}
        for source in sources:
            given = {one.name: arrays[one.name].reshape(shape_of(one, sizes)) for one in source.plan.pointers}
            emulate(source, given, sizes, object_cache, blocks=block_count(source.plan, sizes))
        exact = {one.name: in_float64(arrays[one.name]) for one in (*spec.inputs, *outputs_of(spec))}
        expected = evaluate(spec, {one.name: exact[one.name] for one in spec.inputs})
        for one in outputs_of(spec):
            said = faults(exact[one.name].reshape(expected[one.name].shape), expected[one.name], tolerance_of(spec))
            right += not said
            wrong += [f"seed {seed}, {found.kind}: {one.name} differs in {said}"] * bool(said)
    assert not wrong, "\n".join(wrong)
    assert right


def on_card(torch: Any, tensor: Tensor, array: np.ndarray) -> Any:
    """The array as the tensor's type, rows padded to 16 bytes as tensor copies need them, with NaN between them."""
    types = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16, DType.F8E4M3: torch.float8_e4m3fn}
    found = torch.from_numpy(np.ascontiguousarray(array)).cuda()
    return found.to(types[tensor.dtype]) if tensor.dtype in types else found


def padded(torch: Any, array: Any) -> Any:
    """The same elements in rows of a multiple of 16 bytes, with NaN between them."""
    inner, width = array.shape[-1], 16 // array.element_size()
    whole = torch.full((*array.shape[:-1], -(-inner // width) * width), math.nan, device="cuda").to(array.dtype)
    whole[..., :inner] = array
    return whole[..., :inner]


def launch_all(torch: Any, kernels: list[CudaKernel], arrays: dict[str, Any], sizes: dict[str, int]) -> None:
    """All kernels of a region, one after the other. CudaError where one refuses its arrays."""
    for kernel in kernels:
        program = kernel.plan.program
        given: dict[str, Any] = {}
        for tensor in (*program.inputs, *program.outputs):
            shape = shape_of(tensor, sizes)
            if tensor.name == SIZES:
                given[tensor.name] = torch.empty(shape, dtype=torch.uint8, device="cuda")
                continue
            array = arrays[tensor.name]
            array = array.reshape(shape) if array.is_contiguous() else array
            given[tensor.name] = (
                array.view(torch.uint8) if array.element_size() == 1 and array.is_floating_point() else array
            )
        Launcher(kernel)(given, stream=torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


def runs(torch: Any, found: RandomSpec, cache: Path, *, adapted: bool) -> Iterator[tuple[str, str]]:
    """(output, what is wrong with it), for plain numbers and with NaN and infinity among them. CudaError: refused.

    Recurrences in chunks add up what infinities cancel in, which gives NaN where a sum step by step is infinite.
    """
    way, kernels = made(found.spec, H100, lambda source: build(source, cache), adapted=adapted)
    spec, sizes = found.spec, found.sizes
    for special in (False, True):
        rng = np.random.default_rng(found.seed)
        arrays = {one.name: on_card(torch, one, drawn(one, shape_of(one, sizes), rng)) for one in spec.inputs}
        if special:  # keys and values that a mask hides are not read, other operands are
            first = next((arrays[name] for name in ("x", "q", "a") if name in arrays), None)
            if isinstance(spec, ScanSpec) or first is None or first.numel() == 0:
                return
            if not first.is_floating_point() or first.element_size() == 1:
                return
            first.view(-1)[int(rng.integers(first.numel()))] = math.nan
            first.view(-1)[int(rng.integers(first.numel()))] = math.inf
        for one in (*outputs_of(spec), *way.scratch):
            arrays[one.name] = on_card(torch, one, poisoned(one, shape_of(one, sizes)))
        try:
            launch_all(torch, kernels, arrays, sizes)
        except CudaError as error:
            if "pad its rows" not in str(error):
                raise
            given = {one.name for one in spec.inputs if one.dtype.is_float and one.dtype.row.bytes > 1}
            arrays = {name: padded(torch, array) if name in given else array for name, array in arrays.items()}
            launch_all(torch, kernels, arrays, sizes)
        exact = {name: (one.double() if one.is_floating_point() else one).cpu().numpy() for name, one in arrays.items()}
        expected = evaluate(spec, {one.name: exact[one.name] for one in spec.inputs})
        for one in outputs_of(spec):
            said = faults(exact[one.name].reshape(expected[one.name].shape), expected[one.name], tolerance_of(spec))
            yield f"{one.name}{' with NaN and infinity' * special}", said


@pytest.mark.gpu
@pytest.mark.timeout(7200)
def test_random_regions_are_right_on_a_card(seeds: range, object_cache: Path) -> None:
    torch = pytest.importorskip("torch")
    right, wrong = 0, list[str]()
    for seed in seeds:
        found = random_spec(seed)
        for adapted in (False, True):
            try:
                for output, said in runs(torch, found, object_cache, adapted=adapted):
                    right += not said
                    wrong += [f"seed {seed}, {found.kind}, adapted {adapted}: {output} differs in {said}"] * bool(said)
            except CudaError as error:
                check_reason(error)
                wrong += [f"seed {seed}: {error}"] * ("illegal" in str(error))
    assert not wrong, "\n".join(wrong)
    assert right > len(seeds)
