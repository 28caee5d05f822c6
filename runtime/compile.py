"""The whole path, one call per arrow: model file → regions → kernels → fused model and its library.

    load ─ find (expand ─ infer ─ scan) ─ compile_spec (per distinct region) ─ rewrite ─ link ─ verify, repair ─ save

Output files appear whole or not at all: everything is built and checked under temporary names first. A region whose
kernel is found wrong is left out and reported.
"""

import os
import platform
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

from fuser.assumptions import assumptions_of, checked
from fuser.between import store_rounded
from fuser.body import DOMAIN
from fuser.coverage import Workload, coverage_of, workload_of
from fuser.expand.apply import own_names
from fuser.find import Found, find
from fuser.load import LoadError, load
from fuser.operands import OPSET, narrow, operands_of, where_it_pays
from fuser.region import Miss, Region, name_of
from fuser.rewrite import Replacement, Rewritten, rewrite
from fuser.same_names import compared
from fuser.save import save
from fuser.shapes import Shapes, infer
from fuser.standalone import is_weight
from fuser.unpad import UnpadError, unpad
from runtime import native
from runtime.cost import card_cost, machine_cost
from runtime.inputs import InputError
from runtime.kernels import KernelWriter, card_profile, kernel_writer
from runtime.machine import machine_profile
from runtime.options import CARDS, Options
from runtime.page.assemble import finish, sketch
from runtime.places import PlaceError, check_output, check_place, passing, reason
from runtime.repair import Key, RepairError, Suspect, repair
from runtime.report import FaultReport, MissReport, RegionReport, Report
from runtime.repro import write_repro
from runtime.session import LIBRARY_HASH, library_hash
from runtime.session import LoadError as SessionError
from runtime.verify import BF16, PRECISION, FusedError, Verdict, VerifyError, expose
from runtime.verify import verify as verify_model
from tilecore.canonical import canonical
from tilecore.compile import HEADERS, Dump, Kernel
from tilecore.contract.spec import Spec, byte_block_of
from tilecore.cuda.errors import CudaError
from tilecore.cuda.nvrtc import load_nvrtc
from tilecore.link import Objects, link_kernels
from tilecore.profile import HardwareProfile
from tilecore.target import Target, targets_for
from tilecore.toolchain import BuildError, KernelBuildError, Source, find_toolchain

Array = npt.NDArray[Any]
Progress = Callable[[str], None]


class CompileError(RuntimeError):
    """The model cannot be optimised; one line that says what was found and what to do."""


@dataclass(frozen=True, slots=True)
class Part:
    """A region with its kernel, and the names of its values as they were before anything was rewritten."""

    region: Region
    kernel: Kernel
    inputs: tuple[str, ...]
    outputs: Key

    @property
    def replacement(self) -> Replacement:
        """What the rewriting puts in the region's place."""
        return Replacement(self.region, self.kernel.name, self.kernel.packed)


@dataclass(frozen=True, slots=True)
class Fused:
    """A scanned model with the kernel of each region, before anything is rewritten; `dropped` are left out of it.

    A model that has nodes of ours already, `fused_before`, is not searched again: its library has their kernels.
    """

    model: ir.Model
    shapes: Shapes
    workload: Workload
    nodes_before: int
    fused_before: int
    parts: tuple[Part, ...]
    dropped: tuple[Part, ...]
    misses: tuple[Miss, ...]


@dataclass(frozen=True, slots=True)
class Build:
    """A rewritten model and its library, not written yet. It is checked on `inputs`, or on generated ones."""

    original: Path
    output: Path
    fused: Fused
    rewritten: Rewritten
    library: Path
    inputs: Mapping[str, Array] | None

    @property
    def keys(self) -> tuple[Key, ...]:
        """The regions, by the names of their outputs."""
        return tuple(part.outputs for part in self.fused.parts)

    def check(self) -> Verdict:
        """Compare with the original. CompileError when that cannot be done."""
        try:
            with self._staged() as path:
                return verify_model(self.original, path, inputs=self.inputs)
        except FusedError:
            raise
        except (VerifyError, InputError, SessionError) as error:
            raise CompileError(f"could not check the fused model ({error}); --no-verify writes it unchecked") from error

    def around(self, key: Key, feeds: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """The inputs (but weights) and outputs of a region that was left out, when the model runs on `feeds`."""
        part = next(part for part in self.fused.dropped if part.outputs == key)
        inputs = [name for name, value in zip(part.inputs, part.region.inputs, strict=True) if not is_weight(value)]
        with self._staged() as path:
            found = expose(path, [name for name in (*inputs, *key) if name not in feeds], feeds)
        return {name: {**feeds, **found}[name] for name in inputs}, {name: found[name] for name in key}

    @contextmanager
    def _staged(self) -> Generator[Path]:
        """The model and its library under passing names beside the output, where external weights can stay in place."""
        staged = passing(self.output, os.getpid())
        with ExitStack() as undo:
            for path in (staged.model, staged.library, staged.weights):
                undo.callback(path.unlink, missing_ok=True)
            shutil.copyfile(self.library, staged.library)
            save(self.rewritten.model, staged.model)
            yield staged.model


def optimize(
    model: Path,
    output: Path,
    *,
    options: Options,
    progress: Progress,
    verify: bool = True,
    inputs: Mapping[str, Array] | None = None,
    repros: Path | None = None,
) -> Report:
    """Fuse `model` and write `output` with its library beside it (suffix .so), checked on `inputs` or generated ones.

    A region whose kernel is found wrong, or is refused by the C compiler, is left out and stands in the report's
    `faults`; with `repros`, a folder there shows it. Raises CompileError when the model is bad, the output cannot be
    written, there is no C compiler, or the fused model does not compute what the original does although no region is
    to blame; then nothing is written. A model that is fused already is written as it is, with its library.
    """
    start = time.monotonic()
    try:
        check_output(output, model)
    except PlaceError as error:
        raise CompileError(str(error)) from error
    if options.cuda:
        try:
            load_nvrtc()
        except CudaError as error:
            raise CompileError(f"kernels for NVIDIA cards: {error} (or pip install 'tilefuse[cuda]')") from error
    kernels: dict[Spec, Kernel | str] = {}
    broken: dict[Key, str] = {}

    def build(without: frozenset[Key]) -> Build:
        built = _build(model, output, options, progress, kernels, broken, without, objects)
        progress("comparing with the original")
        return replace(built, inputs=inputs)

    try:
        with Objects(lambda: find_toolchain(options.cache / "objects", options.compiler)) as objects:
            built, suspects = repair(build) if verify else (build(frozenset()), ())
        progress("writing")
        suspects = (*suspects, *(Suspect(key, problem) for key, problem in broken.items()))
        faults = _faults(model, suspects, options, kernels, repros) if suspects else ()
        _write(built.rewritten.model, built.library, output)
    except (LoadError, UnpadError, BuildError) as error:
        raise CompileError(str(error)) from error
    except OSError as error:
        raise CompileError(f"{output} was not written: {reason(error)}") from error
    except RepairError as error:
        raise CompileError(f"the fused model differs from the original: {error}. Nothing was written") from error
    return _report(model, output, built.fused, built.rewritten, options, start, faults)


def explain(
    model: Path,
    *,
    options: Options,
    page: Path | None = None,
    timings: Mapping[str, tuple[float, float]] | None = None,
) -> Report:
    """What `optimize` would do: the same report, with nothing compiled to machine code.

    Nothing is written but `page`, an HTML file that shows the graph, its regions and their kernels; with `timings`,
    measured seconds by operator, fused and unfused, the report and the page have them too.
    """
    start = time.monotonic()
    texts: dict[str, str] = {}
    try:
        if page is not None:
            check_place(page)
        watch = None if page is None else texts.__setitem__
        fused = fuse(model, options, lambda stage: None, {}, frozenset(), watch, cubins=False)
        regions = [part.region for part in fused.parts]
        drawn = None if page is None else sketch(fused.model, regions, fused.workload)
        rewritten = rewrite(fused.model, [part.replacement for part in fused.parts])
        report = _report(model, None, fused, rewritten, options, start, ()).with_timings(timings or {})
        if page is not None and drawn is not None:
            kernels = [part.kernel for part in fused.parts]
            finish(
                page,
                drawn,
                report,
                rewritten=rewritten.model,
                kernels=kernels,
                texts=texts,
                target=machine_profile(options).target.name,
            )
    except (LoadError, UnpadError, PlaceError) as error:
        raise CompileError(str(error)) from error
    except OSError as error:
        raise CompileError(reason(error) if page is None else f"{page} was not written: {reason(error)}") from error
    return report


def _build(
    model: Path,
    output: Path,
    options: Options,
    progress: Progress,
    kernels: dict[Spec, Kernel | str],
    broken: dict[Key, str],
    without: frozenset[Key],
    objects: Objects,
) -> Build:
    """The model without some regions and those that are `broken`: the compiler refuses their kernels.

    The C compiler starts on every kernel as soon as it is written.
    """
    targets = _targets(options)

    def start(kernel: Kernel) -> None:
        objects.start_kernel(kernel, targets)

    while True:
        fused = fuse(model, options, progress, kernels, without | frozenset(broken), start=start)
        _check_weights(fused.model, model, output)
        progress("rewriting the graph")
        rewritten = rewrite(fused.model, [part.replacement for part in fused.parts])
        named = {part.kernel.name: part.kernel for part in fused.parts}
        named |= {alias: _renamed(named[name], alias) for alias, name in rewritten.aliases.items()}
        progress(f"compiling {len(named)} kernels")
        try:
            kept = fused.fused_before > 0
            far = _weight_bytes(rewritten.model) > machine_profile(options).last_cache_bytes
            linkable = [named[n] for n in sorted(named)]
            library = _library_of(model) if kept else _link(linkable, targets, objects, from_memory=far)
        except KernelBuildError as error:  # a fault of ours in one kernel: the others still serve
            refused = {rewritten.aliases.get(name, name): problem for name, problem in error.problems.items()}
            broken |= {part.outputs: refused[part.kernel.name] for part in fused.parts if part.kernel.name in refused}
            continue
        if not kept:  # else it records what it was written with
            rewritten.model.metadata_props[LIBRARY_HASH] = library_hash(library)
            if options.precision != Options.precision:
                rewritten.model.metadata_props[PRECISION] = options.precision
        return Build(model, output, fused, rewritten, library, None)


def _check_weights(model: ir.Model, path: Path, output: Path) -> None:
    """CompileError where the output's weights would replace those of the model."""
    data = output.with_name(f"{output.name}.data")
    if not data.exists():
        return
    values = (value.const_value for graph in model.graphs() for value in graph.initializers.values())
    if any(isinstance(value, ir.ExternalTensor) and data.samefile(value.path) for value in values):
        raise CompileError(
            f"{output}: its weights would replace {data}, which holds those of {path}: name another file"
        )


def _library_of(model: Path) -> Path:
    """The library of a model that is fused already. CompileError when it is not there."""
    library = model.with_suffix(".so")
    if not library.is_file():
        raise CompileError(f"{model} is fused already, but its library {library} is missing: optimise the original")
    return library


def _faults(
    model: Path,
    suspects: Sequence[Suspect],
    options: Options,
    kernels: dict[Spec, Kernel | str],
    repros: Path | None,
) -> tuple[FaultReport, ...]:
    """The regions that were left out, each written to `repros` if that is given."""
    by_key = {suspect.key: suspect for suspect in suspects}
    fused = fuse(model, options, lambda stage: None, kernels, frozenset(by_key))
    faults: list[FaultReport] = []
    for part in fused.dropped:
        region, suspect = part.region, by_key[part.outputs]
        where = None
        if repros is not None:
            opsets = fused.model.graph.opset_imports
            where = write_repro(repros, region, kernel=part.kernel, suspect=suspect, shapes=fused.shapes, opsets=opsets)
        nodes = own_names(region.nodes)
        faults.append(
            FaultReport(region.kind, region.label, nodes, suspect.key, suspect.problem, str(where) if where else None)
        )
    return tuple(faults)


def fuse(
    path: Path,
    options: Options,
    progress: Progress,
    kernels: dict[Spec, Kernel | str],
    without: frozenset[Key],
    watch: Dump | None = None,
    *,
    cubins: bool = True,
    start: Callable[[Kernel], None] | None = None,
) -> Fused:
    """Scan the model and write its kernels: what every command does first.

    `kernels` keeps what was compiled for the next time, `without` are regions to leave out, `watch` sees what is
    dumped, `start` every kernel when it has been written. Kernels for NVIDIA cards, if `options` ask for them, are
    built unless `cubins` is off. LoadError for a bad model.
    """
    dump = _dump(options, watch)
    progress("reading the model")
    model = load(path)
    nodes = sum(1 for _ in model.graph.all_nodes())
    if options.unpad is not None:
        unpad(model, options.unpad)
    fused_before = sum(node.domain == DOMAIN for node in model.graph.all_nodes())
    if fused_before:
        shapes = infer(model)
        return Fused(model, shapes, workload_of(model, shapes), nodes, fused_before, (), (), ())
    progress("finding regions")
    profile, targets = machine_profile(options), _targets(options)
    writer = kernel_writer(options, profile, targets, dump=dump, cubins=cubins)
    rounded = options.precision == BF16
    cost = machine_cost(profile, _main_target(profile, targets), fuse_all=options.fuse_all, narrow=rounded)
    card = card_cost(card_profile(options), narrow=rounded) if options.cuda else None
    found = find(model, card or cost)
    model, regions, misses = found.model, found.regions, found.misses
    if rounded:
        regions = _narrowed(model, regions, found.shapes, everything=options.cuda)
    _dump_scan(model, regions, misses, dump)
    among = set(regions) if rounded and not options.cuda else set[Region]()
    stored = store_rounded(model.graph, regions, among)
    parts, dropped, refused = _parts(found, stored, writer, kernels, without, progress, start)
    while len(kept := among & _originals(parts, regions, stored)) < len(among):  # who is no node stores what it did
        among = kept
        stored = store_rounded(model.graph, regions, among)
        parts, _, refused = _parts(found, stored, writer, kernels, without, progress, start)
    return Fused(model, found.shapes, workload_of(model, found.shapes), nodes, 0, parts, dropped, (*misses, *refused))


def _originals(parts: Sequence[Part], regions: Sequence[Region], stored: Sequence[Region]) -> set[Region]:
    """The regions whose stored form is among `parts`."""
    kept = {part.region for part in parts}
    return {region for region, now in zip(regions, stored, strict=True) if now in kept}


def _parts(
    found: Found,
    regions: Sequence[Region],
    writer: KernelWriter,
    kernels: dict[Spec, Kernel | str],
    without: frozenset[Key],
    progress: Progress,
    start: Callable[[Kernel], None] | None,
) -> tuple[tuple[Part, ...], tuple[Part, ...], tuple[Miss, ...]]:
    """The regions with their kernels, those that are left out, and a miss for each that has no kernel."""

    def written(region: Region) -> Kernel | str:
        spec = canonical(region.spec)
        if spec not in kernels:
            kernels[spec] = new = writer.write(region.kind, spec)
            if start is not None and isinstance(new, Kernel):
                start(new)
        return kernels[spec]

    def part(region: Region) -> Part:
        kernel = written(region)
        assert isinstance(kernel, Kernel)  # others are no longer among the regions
        return Part(region, kernel, _names(region.inputs), _names(region.outputs))

    misses: list[Miss] = []
    kept: list[Region] = []
    dropped: list[Region] = []
    for number, region in enumerate(regions, 1):
        progress(f"writing kernels: region {number} of {len(regions)}")
        kernel = written(region)
        if not isinstance(kernel, Kernel):
            misses.append(_refused(region, kernel))
        else:
            (dropped if _names(region.outputs) in without else kept).append(region)
    checks = assumptions_of(found.model, found.shapes)
    inputs = found.model.graph.inputs
    safe, unsafe = checked(kept, checks, found.shapes, inputs, lambda region: isinstance(written(region), Kernel))
    safe = compared(safe, found.model, found.shapes, lambda region: isinstance(written(region), Kernel))
    reason, advice = "no kernel can check what was assumed of its dims", "fix the dims of the model's inputs"
    misses += [_refused(region, reason, advice) for region in unsafe]
    return tuple(map(part, safe)), tuple(map(part, dropped)), tuple(misses)


def _names(values: Sequence[ir.Value]) -> tuple[str, ...]:
    return tuple(value.name or "" for value in values)


def _narrowed(model: ir.Model, regions: Sequence[Region], shapes: Shapes, *, everything: bool) -> tuple[Region, ...]:
    """The regions with bfloat16 operands where that pays, or wherever it can be, as cards multiply nothing else.

    CompileError for a model whose function bodies could not say so.
    """
    opset = model.graph.opset_imports.get("", 1)
    if opset < OPSET:
        raise CompileError(
            f"--precision bf16 needs opset {OPSET}, the first with casts to bfloat16; the model has {opset}: convert "
            "it with onnx.version_converter, or leave the option out"
        )
    narrowed = tuple(narrow(region, shapes) for region in regions)
    return narrowed if everything else where_it_pays(model.graph, regions, narrowed)


def _refused(
    region: Region, reason: str, advice: str = "nothing to do in the model: the backend has no code for this yet"
) -> Miss:
    """The miss of a region that was found whole and does not run as a kernel."""
    last = region.nodes[-1]
    return Miss(
        region.kind,
        name_of(last),
        reason,
        op=last.op_type,
        reached=f"{region.label}: the whole region was found; the backend refused it",
        advice=advice,
        body=region.body,
    )


def _dump_scan(model: ir.Model, regions: Sequence[Region], misses: Sequence[Miss], dump: Dump | None) -> None:
    if dump is None:
        return
    dump("00_graph.txt", "\n".join(str(node) for node in model.graph.all_nodes()) + "\n")
    lines = [f"{region.kind}: {region.label}\n  {region.spec}" for region in regions]
    lines += [f"miss, {miss.kind}: {miss.node}: {miss.reason}" for miss in misses]
    dump("10_regions.txt", "\n".join(lines) + "\n")


def _main_target(profile: HardwareProfile, targets: tuple[Target, ...]) -> Target:
    """The instruction set that decisions are for: the profile's, where code for it is made."""
    return profile.target if profile.target in targets else targets[0]


def _targets(options: Options) -> tuple[Target, ...]:
    rows = targets_for(platform.machine())
    if options.target == "cpu" or options.cuda:
        return rows
    chosen = tuple(target for target in rows if target.name == options.target)
    if not chosen:
        names = (target.name for target in rows)
        raise CompileError(
            f"TILEFUSE_TARGET is {options.target!r}; on this machine it can be cpu (all of them), "
            f"{', '.join((*CARDS, *names))}"
        )
    return chosen


def _dump(options: Options, watch: Dump | None) -> Dump | None:
    """Where the texts of stages go: to the user's folder, and to `watch`."""
    folder = options.dump
    if folder is None:
        return watch
    folder.mkdir(parents=True, exist_ok=True)

    def write(stage: str, text: str) -> None:
        (folder / stage).write_text(text)
        if watch is not None:
            watch(stage, text)

    return write


def _renamed(kernel: Kernel, name: str) -> Kernel:
    """The same kernel under another operator name."""
    return replace(
        kernel, name=name, sources={t: text.replace(kernel.name, name) for t, text in kernel.sources.items()}
    )


def _weight_bytes(model: ir.Model) -> int:
    """Bytes of the constants that fused nodes read, each once."""
    nodes = (node for node in model.graph.all_nodes() if node.domain == DOMAIN)
    weights = {value: value.const_value for node in nodes for value in node.inputs if value is not None}
    return sum(tensor.nbytes for tensor in weights.values() if tensor is not None)


def _link(kernels: Sequence[Kernel], targets: tuple[Target, ...], objects: Objects, *, from_memory: bool) -> Path:
    cards = {kernel.name: kernel.cards for kernel in kernels if kernel.cards is not None}
    texts = {one.symbol: one.source for one in cards.values()}
    sources = [Source(texts[symbol], include=(HEADERS,)) for symbol in sorted(texts)]
    symbols = {name: one.symbol for name, one in cards.items()}
    host = (*native.shim_sources(), *sources)
    return link_kernels(kernels, targets, objects, cards=symbols, host=host, from_memory=from_memory)


def _write(model: ir.Model, library: Path, output: Path) -> None:
    """Put the library and the model in place."""
    passed = passing(output, os.getpid()).library
    with ExitStack() as undo:
        undo.callback(passed.unlink, missing_ok=True)
        shutil.copyfile(library, passed)
        save(model, output)
        os.replace(passed, output.with_suffix(".so"))


def _report(
    model: Path, output: Path | None, fused: Fused, rewritten: Rewritten, options: Options, start: float,
    faults: tuple[FaultReport, ...],
) -> Report:  # fmt: skip
    regions = tuple(
        RegionReport(
            part.region.kind,
            part.region.label,
            own_names(part.region.nodes),
            part.inputs,
            part.outputs,
            op,
            f"{part.kernel.kernel}({', '.join(f'{name}={value}' for name, value in part.kernel.config.items())})",
            part.region.body,
            part.region.predicted.fused if part.region.predicted else None,
            part.region.predicted.unfused if part.region.predicted else None,
            target="cuda" if options.cuda else "cpu",
            byte_block=0 if options.cuda else byte_block_of(part.region.spec),
            operands=operands_of(part.region) if options.precision == BF16 else "",
        )
        for part, op in zip(fused.parts, rewritten.op_types, strict=True)
    )
    misses = tuple(
        MissReport(miss.kind, miss.node, miss.reason, miss.op, miss.reached, miss.failed, miss.advice, miss.body)
        for miss in fused.misses
    )
    return Report(
        str(model),
        str(output) if output else None,
        str(output.with_suffix(".so")) if output else None,
        fused.nodes_before,
        sum(1 for _ in rewritten.model.graph.all_nodes()),
        regions,
        misses,
        round(time.monotonic() - start, 3),
        coverage_of(fused.workload, [part.region for part in fused.parts], rewritten.model),
        faults,
        fused.fused_before,
    )
