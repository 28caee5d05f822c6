"""Results as tables for people. In: a result. Out: what is printed to the console. JSON is printed elsewhere."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fuser.operands import BFLOAT16
from runtime.bench import BenchResult
from runtime.bench_regions import RegionTiming
from runtime.report import MissReport, Report
from runtime.tune import TunedFunction, TunedKernel
from runtime.tuned import config_text
from runtime.verify import Verdict
from tilecore.cuda.profile import GpuProfile
from tilecore.measure import Measured
from tilecore.profile import HardwareProfile

MOVERS, MISSES = 8, 3  # names that are listed before "and … more"


def print_report(console: Console, report: Report) -> None:
    """What was fused, what was not and why; equal regions, such as those of a model's layers, share a line."""
    if report.fused_before:
        console.print(f"nothing to fuse: already fused ({report.fused_before} nodes with kernels)")
        _print_files(console, report)
        return
    if report.regions:
        cards = ", with kernels for NVIDIA cards" if any(one.target == "cuda" for one in report.regions) else ""
        table = Table(title=f"fused regions{cards}", title_justify="left")
        table.add_column("times", justify="right", no_wrap=True)
        table.add_column("kind", no_wrap=True)
        table.add_column("label", overflow="fold", ratio=1)
        table.add_column("nodes", justify="right", no_wrap=True)
        table.add_column("operator", overflow="fold")
        counted = Counter((region.kind, region.label, len(region.nodes), region.op) for region in report.regions)
        for (kind, label, nodes, op), times in counted.items():
            table.add_row(str(times), kind, escape(_short(label)), str(nodes), op)
        console.print(table)
    rounded = sum(region.byte_block > 0 for region in report.regions)
    if rounded:
        console.print(f"{rounded} regions may round activations to bytes: accuracy_level=4 of their nodes permits it")
    for operands, times in Counter(region.operands for region in report.regions).items():
        if operands not in ("", BFLOAT16):
            console.print(f"operands of {times} regions: {operands}", markup=False, highlight=False)
    print_coverage(console, report)
    print_misses(console, report)
    for fault in report.faults:
        console.print(f"BUG IN TILEFUSE: {fault.kind} region left out, its kernel is at fault", style="bold red")
        console.print(f"  {fault.label}: {fault.problem}", markup=False)
        if fault.repro:
            console.print(f"  please send us {fault.repro}", markup=False)
        else:
            console.print("  run again with --save-repro DIR and send us what it writes", markup=False)
    console.print(f"{report.nodes_before} nodes became {report.nodes_after} in {report.seconds:.1f} s")
    _print_files(console, report)


def _short(label: str) -> str:
    """Operators that a label repeats, once, with how often: a table has little room."""
    counted = Counter(label.split(" + "))
    return " + ".join(name if times == 1 else f"{times} {name}" for name, times in counted.items())


def _print_files(console: Console, report: Report) -> None:
    if report.output:
        console.print(f"wrote {report.output} and {report.library}", soft_wrap=True, markup=False)


def print_coverage(console: Console, report: Report) -> None:
    """What share of the model its regions are, and which operators still move data."""
    coverage = report.coverage
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.kinds.items()) or "none"
    console.print(
        f"regions: {kinds}; they have {coverage.flops:.1%} of the floating-point operations "
        f"and {coverage.nodes:.1%} of the nodes "
        f"({coverage.nodes_fused} of {coverage.nodes_fused + coverage.nodes_left})",
        markup=False,
    )
    if coverage.movers:
        shown = ", ".join(coverage.movers[:MOVERS])
        more = f" and {len(coverage.movers) - MOVERS} more" if len(coverage.movers) > MOVERS else ""
        console.print(f"data movement left: {shown}{more}", markup=False)


def print_misses(console: Console, report: Report) -> None:
    """Every miss: how far the search got, what failed, what would help. Misses of one cause share an entry."""
    groups: dict[tuple[str, str, str], list[MissReport]] = {}
    for miss in report.misses:
        groups.setdefault((miss.kind, miss.op, miss.advice), []).append(miss)
    if groups:
        console.print("[italic]not fused[/italic]")
    for (kind, op, advice), misses in groups.items():
        first = misses[0]
        names = ", ".join(miss.node for miss in misses[:MISSES])
        more = f" and {len(misses) - MISSES} more" if len(misses) > MISSES else ""
        console.print(f"  {kind}: {op} {names}{more}", markup=False, highlight=False)
        for title, text in (("found", first.reached), ("but", first.reason), ("at", first.failed), ("help", advice)):
            if text:
                console.print(f"    {title + ':':7}{text}", markup=False, highlight=False)


def print_verdict(console: Console, verdict: Verdict) -> None:
    """The errors of every output."""
    table = Table()
    for heading in ("output", "largest absolute error", "largest relative error"):
        table.add_column(heading, overflow="fold")
    for output in verdict.outputs:
        table.add_row(escape(output.name), f"{output.max_abs:.3g}", f"{output.max_rel:.3g}")
    if verdict.outputs:
        console.print(table)
    for cost in verdict.costs:
        console.print(
            f"rounded operands cost {cost.name}: {cost.drift:.2e} of its root mean square, cosine {cost.cosine:.6f}",
            markup=False,
            highlight=False,
        )
    if verdict.ok:
        console.print("ok")
        return
    console.print(f"the models differ: {verdict.mismatch}", soft_wrap=True, markup=False)
    for region in verdict.regions:
        console.print(f"wrong: {region.node} ({region.op})", soft_wrap=True, markup=False)


def print_bench(console: Console, result: BenchResult) -> None:
    """Medians and their ratio."""
    table = Table()
    for heading in ("model", "median", "fastest", "runs"):
        table.add_column(heading)
    for name, timing in (("fused", result.fused), ("original", result.original)):
        table.add_row(name, f"{timing.median_ms:.3f} ms", f"{timing.min_ms:.3f} ms", str(timing.runs))
    console.print(table)
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in result.shapes.items())
    console.print(f"the fused model is {result.ratio:.2f} times as fast as the original ({shapes})", markup=False)


def print_regions(console: Console, timings: Sequence[RegionTiming]) -> None:
    """Measured and predicted microseconds of every distinct region, fused and not."""
    table = Table()
    table.add_column("times", justify="right")
    table.add_column("label", max_width=30)
    for heading in ("fused µs", "predicted", "unfused µs", "predicted", "ratio"):
        table.add_column(heading, justify="right")
    for timing in timings:
        figures = (timing.fused_us, timing.predicted_fused_us, timing.unfused_us, timing.predicted_unfused_us)
        columns = ["–" if figure is None else f"{figure:.0f}" for figure in figures]
        table.add_row(str(timing.times), escape(timing.label), *columns, f"{timing.ratio:.2f}×")
    console.print(table)


def print_outputs(console: Console, outputs: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Names, types, shapes and the first values."""
    table = Table()
    for heading in ("output", "type", "shape", "first values"):
        table.add_column(heading, overflow="fold")
    for name, array in outputs.items():
        first = ", ".join(str(value) for value in array.ravel()[:4])
        more = ", …" if array.size > 4 else ""
        table.add_row(escape(name), str(array.dtype), escape(str(list(array.shape))), escape(first + more))
    console.print(table)


def print_measured(console: Console, measured: Measured) -> None:
    """The measured rates of one core: alone, with all cores at work, and per cycle."""
    profile = measured.profile
    table = Table(title=f"{profile.name}: {profile.cores} cores, {profile.target.name}", title_justify="left")
    for column in ("of one core", "alone", f"with all {profile.cores}", "per cycle"):
        table.add_column(column, justify="left" if column == "of one core" else "right")
    for rate in measured.rates:
        per_cycle = "" if rate.unit == "Hz" else f"{rate.together / profile.clock:.1f}"
        cells = [f"{value / 1e9:.2f} G{rate.unit}" if value else "none" for value in (rate.alone, rate.together)]
        table.add_row(rate.name, *cells, per_cycle)
    console.print(table)
    sizes = ", ".join(f"{name} {_bytes(size)}" for name, size in _caches(profile))
    console.print(f"caches: {sizes}" + ("" if measured.caches_known else " (assumed: the system does not say all)"))


def print_profiles(console: Console, profiles: Sequence[HardwareProfile]) -> None:
    """The rows of the table of machines."""
    table = Table(title="machines (TILEFUSE_PROFILE=NAME makes kernels for one of them)", title_justify="left")
    for column in ("name", "instructions", "caches", "f32 multiply-adds / cycle", "bytes / cycle L1, L2, L3, DRAM"):
        table.add_column(column)
    for row in profiles:
        caches = ", ".join(_bytes(size) for _, size in _caches(row))
        rates = ", ".join(f"{rate:g}" for rate in (row.l1_bytes, row.l2_bytes, row.l3_bytes, row.dram_bytes))
        table.add_row(row.name, row.target.name, caches, f"{row.macs_per_cycle:g}", rates)
    console.print(table)


def print_cards(console: Console, cards: Mapping[str, GpuProfile]) -> None:
    """The rows of the table of NVIDIA cards, by the target that makes kernels for them."""
    table = Table(title="cards (--target NAME makes kernels for them)", title_justify="left")
    for column in ("target", "name", "architecture", "multiprocessors", "shared memory", "f16 operations / cycle"):
        table.add_column(column)
    for target, card in cards.items():
        figures = (str(card.processors), _bytes(card.shared_bytes), f"{card.processors * card.flops_per_cycle}")
        table.add_row(target, card.name, card.arch, *figures)
    console.print(table)


def print_tuned(console: Console, kernels: Sequence[TunedKernel]) -> None:
    """What each distinct kernel takes as recommended and as tuned, by the sizes of its symbolic dims."""
    if not kernels:
        console.print("nothing to tune: the model has no regions to fuse, or is fused already; tune the original")
        return
    table = Table(title="tuned kernels", title_justify="left")
    for column in ("times", "kind", "label", "sizes", "recommended µs", "best µs", "extents"):
        table.add_column(column, overflow="fold")
    for kernel in kernels:
        for sizes, (before, after) in kernel.microseconds.items():
            changed = config_text(kernel.best) if kernel.best != kernel.recommended else "as recommended"
            figures = (f"{before:.1f}", f"{after:.1f}", changed)
            table.add_row(str(kernel.times), kernel.kind, escape(kernel.label), sizes, *figures)
    console.print(table)


def print_tuned_functions(console: Console, functions: Sequence[TunedFunction]) -> None:
    """What each configuration of the kernels of a Python file takes, the fastest first."""
    table = Table(title="tuned kernels", title_justify="left")
    for column in ("kernel", "configuration", "µs"):
        table.add_column(column, overflow="fold")
    for function in functions:
        if function.problem:
            table.add_row(function.name, escape(function.problem), "")
        for text, micros in sorted(function.microseconds.items(), key=lambda pair: pair[1]):
            table.add_row(function.name, text, f"{micros:.1f}")
    console.print(table)


def _caches(profile: HardwareProfile) -> tuple[tuple[str, int], ...]:
    return (("L1", profile.l1), ("L2", profile.l2), ("L3", profile.l3))


def _bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
