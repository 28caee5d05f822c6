"""The whole path, one call per arrow: model file → regions → kernels → fused model and its library.

    load ─ find (expand ─ infer ─ scan) ─ compile_spec (per distinct region) ─ rewrite ─ link ─ verify ─ save

Output files appear whole or not at all: everything is built and checked under temporary names first.
"""

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from fuser.expand.apply import own_names
from fuser.find import find
from fuser.load import LoadError, load
from fuser.region import Miss, Region
from fuser.rewrite import Replacement, rewrite
from fuser.save import save
from runtime import native
from runtime.inputs import InputError
from runtime.options import Options
from runtime.report import MissReport, RegionReport, Report
from runtime.session import LoadError as SessionError
from runtime.verify import Verdict, VerifyError
from runtime.verify import verify as verify_model
from tilecore.canonical import canonical
from tilecore.compile import Kernel, compile_spec
from tilecore.contract.spec import Spec
from tilecore.emit_expr import EmitError
from tilecore.infer import InferenceError
from tilecore.link import link_kernels
from tilecore.profile import HardwareProfile, detect_profile
from tilecore.target import Target, targets_for
from tilecore.toolchain import BuildError, Toolchain, find_toolchain

Progress = Callable[[str], None]
LABELS = {"attention": "Attention", "contraction": "Contraction", "row": "Row", "scan": "Scan"}


class CompileError(RuntimeError):
    """The model cannot be optimised; one line that says what was found and what to do."""


@dataclass(frozen=True, slots=True)
class Fused:
    """A scanned model with the kernel of each region, before anything is rewritten."""

    model: ir.Model
    nodes_before: int
    pairs: tuple[tuple[Region, Kernel], ...]
    misses: tuple[Miss, ...]


def optimize(model: Path, output: Path, *, options: Options, progress: Progress, verify: bool = True) -> Report:
    """Fuse `model` and write `output` with its library beside it (suffix .so).

    Raises CompileError when the model is bad, the output cannot be written, the C compiler is missing, or the fused
    model does not compute what the original does; then nothing is written.
    """
    start = time.monotonic()
    if output.suffix != ".onnx":
        raise CompileError(f"{output}: the output must end in .onnx, the library goes beside it with .so")
    try:
        fused = _fuse(model, options, progress)
        progress("rewriting the graph")
        rewritten = rewrite(fused.model, [Replacement(r, k.name, k.packed) for r, k in fused.pairs])
        kernels = {kernel.name: kernel for _, kernel in fused.pairs}
        kernels |= {alias: _renamed(kernels[name], alias) for alias, name in rewritten.aliases.items()}
        progress(f"compiling {len(kernels)} kernels")
        library = _link([kernels[name] for name in sorted(kernels)], options)
        _write(rewritten.model, library, model, output, progress, verify=verify)
    except (LoadError, BuildError, OSError) as error:
        raise CompileError(str(error)) from error
    nodes_after = sum(1 for _ in rewritten.model.graph.all_nodes())
    return _report(model, output, fused, rewritten.op_types, nodes_after, start)


def explain(model: Path, *, options: Options) -> Report:
    """What `optimize` would do: the same report, with nothing compiled to machine code or written."""
    start = time.monotonic()
    try:
        fused = _fuse(model, options, lambda stage: None)
    except LoadError as error:
        raise CompileError(str(error)) from error
    rewritten = rewrite(fused.model, [Replacement(r, k.name, k.packed) for r, k in fused.pairs])
    nodes_after = sum(1 for _ in rewritten.model.graph.all_nodes())
    return _report(model, None, fused, rewritten.op_types, nodes_after, start)


def _fuse(path: Path, options: Options, progress: Progress) -> Fused:
    progress("reading the model")
    model = load(path)
    nodes = sum(1 for _ in model.graph.all_nodes())
    progress("finding regions")
    found = find(model)
    model, regions, misses = found.model, found.regions, found.misses
    _dump_scan(model, regions, misses, _dump(options))
    profile, targets = detect_profile(), _targets(options)
    pairs: list[tuple[Region, Kernel]] = []
    refused: list[Miss] = []
    kernels: dict[Spec, Kernel | str] = {}
    for number, region in enumerate(regions, 1):
        progress(f"writing kernels: region {number} of {len(regions)}")
        spec = canonical(region.spec)
        if spec not in kernels:
            kernels[spec] = _kernel(region.kind, spec, profile, targets, options)
        kernel = kernels[spec]
        if isinstance(kernel, Kernel):
            pairs.append((region, kernel))
        else:
            refused.append(Miss(region.kind, region.nodes[-1].name or region.outputs[0].name or "", kernel))
    return Fused(model, nodes, tuple(pairs), (*misses, *refused))


def _dump_scan(
    model: ir.Model, regions: Sequence[Region], misses: Sequence[Miss], dump: Callable[[str, str], None] | None
) -> None:
    if dump is None:
        return
    dump("00_graph.txt", "\n".join(str(node) for node in model.graph.all_nodes()) + "\n")
    lines = [f"{region.kind}: {region.label}\n  {region.spec}" for region in regions]
    lines += [f"miss, {miss.kind}: {miss.node}: {miss.reason}" for miss in misses]
    dump("10_regions.txt", "\n".join(lines) + "\n")


def _kernel(
    kind: str, spec: Spec, profile: HardwareProfile, targets: tuple[Target, ...], options: Options
) -> Kernel | str:
    """The kernel, or why the backend has none: that region then stays as it was."""
    try:
        kernel = compile_spec(spec, label=LABELS[kind], profile=profile, targets=targets, dump=_dump(options))
    except (EmitError, InferenceError) as error:
        return str(error)
    return _edited(kernel, options.use)


def _edited(kernel: Kernel, use: Path | None) -> Kernel:
    """The kernel with the user's edited text in place of the generated one, if `use` names one of its dumps."""
    if use is None:
        return kernel
    edited = {t: use.read_text() for t in kernel.sources if use.name == f"70_kernel_{kernel.name}_{t}.c"}
    return replace(kernel, sources={**kernel.sources, **edited})


def _targets(options: Options) -> tuple[Target, ...]:
    rows = targets_for(platform.machine())
    if options.target == "cpu":
        return rows
    chosen = tuple(target for target in rows if target.name == options.target)
    if not chosen:
        names = ", ".join(target.name for target in rows)
        raise CompileError(
            f"TILEFUSE_TARGET is {options.target!r}; on this machine it can be cpu (all of them), {names}"
        )
    return chosen


def _dump(options: Options) -> Callable[[str, str], None] | None:
    folder = options.dump
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)

    def write(stage: str, text: str) -> None:
        (folder / stage).write_text(text)

    return write


def _renamed(kernel: Kernel, name: str) -> Kernel:
    """The same kernel under another operator name."""
    return replace(
        kernel, name=name, sources={t: text.replace(kernel.name, name) for t, text in kernel.sources.items()}
    )


def _link(kernels: Sequence[Kernel], options: Options) -> Path:
    toolchain = find_toolchain(options.cache / "objects", options.compiler)
    return link_kernels(kernels, _targets(options), toolchain, host=host_objects(toolchain))


def host_objects(toolchain: Toolchain) -> list[Path]:
    """The objects of the ONNX Runtime shim, built once per cache."""
    return [
        toolchain.object(path.read_text(), ("-pthread",), native.INCLUDE_DIRECTORIES) for path in native.SHIM_SOURCES
    ]


def _write(model: ir.Model, library: Path, original: Path, output: Path, progress: Progress, *, verify: bool) -> None:
    """Check under temporary names, then put the library and the model in place."""
    if not output.parent.is_dir():
        raise CompileError(f"{output.parent} is not a folder: make it first")
    target = output.with_suffix(".so")
    with ExitStack() as undo:
        if verify:
            staged = output.with_name(f".{output.stem}.{os.getpid()}.onnx")
            for path in (staged, staged.with_suffix(".so"), staged.with_name(f"{staged.name}.data")):
                undo.callback(path.unlink, missing_ok=True)
            shutil.copyfile(library, staged.with_suffix(".so"))
            save(model, staged)
            progress("comparing with the original")
            _require_equal(_verdict(original, staged))
        progress("writing")
        with tempfile.NamedTemporaryFile(dir=output.parent, suffix=".so", delete=False) as file:
            undo.callback(Path(file.name).unlink, missing_ok=True)
            file.write(library.read_bytes())
        save(model, output)
        os.chmod(file.name, 0o644)
        os.replace(file.name, target)


def _verdict(original: Path, fused: Path) -> Verdict:
    try:
        return verify_model(original, fused)
    except (VerifyError, InputError, SessionError) as error:
        raise CompileError(f"could not check the fused model ({error}); --no-verify writes it unchecked") from error


def _require_equal(verdict: Verdict) -> None:
    if verdict.ok:
        return
    where = ", ".join(f"{region.node} ({region.op})" for region in verdict.regions) or "no single region"
    raise CompileError(
        f"the fused model differs from the original: {verdict.mismatch}; wrong: {where}. Nothing was written"
    )


def _report(
    model: Path, output: Path | None, fused: Fused, op_types: Sequence[str], nodes_after: int, start: float
) -> Report:
    regions = tuple(
        RegionReport(
            region.kind,
            region.label,
            own_names(region.nodes),
            tuple(value.name or "" for value in region.inputs),
            tuple(value.name or "" for value in region.outputs),
            op,
            f"{kernel.kernel}({', '.join(f'{name}={value}' for name, value in kernel.config.items())})",
        )
        for (region, kernel), op in zip(fused.pairs, op_types, strict=True)
    )
    misses = tuple(MissReport(miss.kind, miss.node, miss.reason) for miss in fused.misses)
    return Report(
        str(model),
        str(output) if output else None,
        str(output.with_suffix(".so")) if output else None,
        fused.nodes_before,
        nodes_after,
        regions,
        misses,
        round(time.monotonic() - start, 3),
    )
