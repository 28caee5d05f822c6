"""Kernels as a program of their own: for sanitizers, and for instruction sets that only an emulator runs."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scan_specs import scan_cases
from tile_specs import AttentionForm, Case, attention_case, contraction_case, row_case, siblings_case

from tilecore.compile import HEADERS, Kernel, compile_spec
from tilecore.contract.dtype import DType
from tilecore.contract.evaluate import evaluate
from tilecore.contract.panel import pack
from tilecore.contract.spec import outputs_of
from tilecore.emit_product import shared_units
from tilecore.link import library_source
from tilecore.profile import profile_named
from tilecore.target import Target

ZIG = (sys.executable, "-m", "ziglang", "cc")
PLAIN = ("-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Werror")
TOLERANCE = 3e-6


@dataclass(frozen=True)
class Standalone:
    """A kernel, its inputs as it takes them, and its outputs by the definition of its spec."""

    kernel: Kernel
    inputs: list[np.ndarray]
    expected: list[np.ndarray]


def odd_cases() -> dict[str, tuple[Case, Mapping[str, int] | None]]:
    """One of every kind of kernel, in sizes that divide nothing, with tiles that their data do not fill."""
    tiles = {"block_m": 5, "block_n": 16}
    forms = {
        "causal": AttentionForm(mask="causal", batch=1, queries=17, keys=17, depth=7),
        "rope": AttentionForm(
            mask="padding", rope=True, softcap=True, sink=True, guard=True, two_outputs=True, groups=2, keys=19, depth=6
        ),
    }
    cases: dict[str, tuple[Case, Mapping[str, int] | None]] = {
        name: (attention_case(form, np.random.default_rng(1)), tiles) for name, form in forms.items()
    }
    for seed in (0, 5):
        config = {"block_m": 4, "block_n": 16, "block_k": 8}
        cases[f"product {seed}"] = (contraction_case(seed, rows=13, columns=37, depth=19), config)
    cases["gated"] = (siblings_case("gated", rows=7, columns=37, depth=11), None)
    for kind in ("layernorm", "index"):
        cases[kind] = (row_case(kind, rows=5, columns=37, dynamic=True), None)
    scan = scan_cases(3, time=5)["causal"]
    cases["scan"] = (Case(scan.spec, scan.arrays), None)
    return cases


def compiled(target: Target) -> list[Standalone]:
    """The kernels of `odd_cases` for one target."""
    profile, found = profile_named("zen3"), list[Standalone]()
    for case, config in odd_cases().values():
        kernel = compile_spec(case.spec, label="Alone", profile=profile, targets=(target,), config=config)
        arrays = [case.arrays[tensor.name] for tensor in case.spec.inputs]
        for position in kernel.packed:
            matrix = arrays[position]
            arrays[position] = pack(matrix if matrix.shape[0] == case.arrays["a"].shape[-1] else matrix.T)
        want = evaluate(case.spec, case.arrays)
        found.append(Standalone(kernel, arrays, [want[tensor.name] for tensor in outputs_of(case.spec)]))
    return found


def build(
    folder: Path, kernels: Sequence[Standalone], target: Target, compiler: Sequence[str], flags: Sequence[str]
) -> Path:
    """The program of these kernels. CalledProcessError when the compiler refuses any."""
    sources = {one.kernel.name: one.kernel.sources[target.name] for one in kernels}
    sources |= {unit.function: unit.text for unit in shared_units(sources.values(), target)}
    sources["library"] = library_source([one.kernel for one in kernels], [target])
    sources["main"] = (Path(__file__).parent / "standalone.c").read_text()

    def compile_source(name: str) -> str:
        (folder / f"{name}.c").write_text(sources[name])
        arguments = [*flags, f"-I{HEADERS}", "-c", str(folder / f"{name}.c"), "-o", str(folder / f"{name}.o")]
        subprocess.run([*compiler, *arguments], check=True)
        return str(folder / f"{name}.o")

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_source, sources))
    program = folder / "kernels"
    subprocess.run([*compiler, *flags, *objects, "-o", str(program), "-lm"], check=True)
    return program


def check_program(folder: Path, kernels: Sequence[Standalone], command: Sequence[str]) -> None:
    """Run every kernel once in one process, and compare its outputs with the definition of its spec."""
    calls = b"".join(
        np.int64(number).tobytes() + b"".join(_tensor(array) for array in one.inputs)
        for number, one in enumerate(kernels)
    )
    (folder / "in.bin").write_bytes(calls)
    paths = [str(folder / "in.bin"), str(folder / "out.bin")]
    result = subprocess.run([*command, *paths], capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stderr[-4000:]
    data = (folder / "out.bin").read_bytes()
    for one in kernels:
        for tensor, expected in zip(outputs_of(one.kernel.spec), one.expected, strict=True):
            kind = tensor.dtype.row.numpy
            size = expected.size * kind.itemsize
            got, data = np.frombuffer(data[:size], kind).reshape(expected.shape), data[size:]
            tolerance = 1e-3 if tensor.dtype is DType.F16 else TOLERANCE
            finite = np.abs(expected[np.isfinite(expected)])
            scale = max(1.0, float(finite.max())) if finite.size else 1.0
            np.testing.assert_allclose(got.astype(np.float64), expected, rtol=0, atol=tolerance * scale, equal_nan=True)
    assert not data


def _tensor(array: np.ndarray) -> bytes:
    dims = np.array([array.ndim, *array.shape], np.int64)
    return dims.tobytes() + np.ascontiguousarray(array).tobytes()
