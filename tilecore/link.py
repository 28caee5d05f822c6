"""Linking: kernels and a host's objects → one shared library with a variant per instruction set.

The generated `library.c` is the table of `tile_kernel.h`; whoever hosts the kernels (the custom-op shim, the Python
callable) adds its own objects.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tilecore.compile import HEADERS, Kernel
from tilecore.emit_host import kernel_symbol
from tilecore.target import Target
from tilecore.toolchain import Toolchain


def link_kernels(
    kernels: Sequence[Kernel],
    targets: Sequence[Target],
    toolchain: Toolchain,
    *,
    host: Sequence[Path] = (),
    workers: int = 2,
) -> Path:
    """The library of `kernels` (distinct names) for `targets`, with `host` objects; built at most once per content."""
    jobs = [(kernel.sources[target.name], target.flags) for target in targets for kernel in kernels]
    with ThreadPoolExecutor(workers) as pool:
        objects = list(pool.map(lambda job: toolchain.object(job[0], job[1], [HEADERS]), jobs))
    table = toolchain.object(library_source(kernels, targets), (), [HEADERS])
    return toolchain.library([*objects, table, *host])


def library_source(kernels: Sequence[Kernel], targets: Sequence[Target]) -> str:
    """The C text that defines `tile_generated_library`."""
    lines = ['#include "tile_kernel.h"', '#include "tile_features.h"']
    rows: list[str] = []
    for number, target in enumerate(targets):
        names = [kernel_symbol(kernel.name, target) for kernel in kernels]
        lines += [f"extern const tile_kernel {name};" for name in names]
        table = ", ".join(f"&{name}" for name in names) or "NULL"
        lines.append(f"static const tile_kernel* const kernels_{number}[] = {{{table}}};")
        lines.append(f"static int32_t supported_{number}(void) {{ return ({target.supported}) != 0; }}")
        rows.append(f'{{"{target.name}", supported_{number}, {len(kernels)}, kernels_{number}}}')
    lines.append(f"static const tile_variant variants[] = {{{', '.join(rows)}}};")
    lines.append('__attribute__((visibility("default"))) extern const tile_library tile_generated_library;')
    lines.append(f"const tile_library tile_generated_library = {{TILE_ABI_VERSION, {len(targets)}, variants}};")
    return "\n".join(lines) + "\n"
