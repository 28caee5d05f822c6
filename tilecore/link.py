"""Linking: kernels and a host's objects → one shared library with a variant per instruction set.

The generated `library.c` is the table of `tile_kernel.h`; whoever hosts the kernels (the custom-op shim, the Python
callable) adds its own sources.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Protocol

from tilecore.compile import HEADERS
from tilecore.emit_host import kernel_symbol
from tilecore.target import Target
from tilecore.toolchain import BrokenToolchainError, BuildError, KernelBuildError, Source, Toolchain


class Linkable(Protocol):
    """A kernel with a name of its own and C text by target name."""

    @property
    def name(self) -> str:
        """What its table is named after."""
        ...

    @property
    def sources(self) -> Mapping[str, str]:
        """Translation units."""
        ...


def link_kernels(
    kernels: Sequence[Linkable],
    targets: Sequence[Target],
    toolchain: Toolchain,
    *,
    cards: Mapping[str, str] | None = None,
    host: Sequence[Source] = (),
    workers: int = 2,
) -> Path:
    """The library of `kernels` (distinct names) for `targets`, with the `host`; built at most once per content.

    `cards` has the C names of what some have for NVIDIA cards, by the kernel's name; `host` defines them.

    KernelBuildError names every kernel that the compiler refuses; BrokenToolchainError says why nothing can be built.
    """
    targets = [target for target in targets if not kernels or any(target.name in kernel.sources for kernel in kernels)]
    problems: dict[str, str] = {}

    def build(job: tuple[Target, Linkable]) -> Path | None:
        target, kernel = job
        try:
            return toolchain.object(Source(kernel.sources[target.name], target.flags, (HEADERS,)))
        except BrokenToolchainError:
            raise
        except BuildError as error:
            problems[kernel.name] = f"{target.name}: {error}"
            return None

    with ThreadPoolExecutor(workers) as pool:
        jobs = [(target, kernel) for target, kernel in product(targets, kernels) if target.name in kernel.sources]
        objects = pool.map(build, jobs)
        others = pool.map(
            toolchain.object, [Source(library_source(kernels, targets, cards), include=(HEADERS,)), *host]
        )
        built = [*objects, *others]
    if problems:
        raise KernelBuildError(problems)
    return toolchain.library([path for path in built if path is not None])


def library_source(
    kernels: Sequence[Linkable], targets: Sequence[Target], cards: Mapping[str, str] | None = None
) -> str:
    """The C text that defines `tile_generated_library`. A kernel without text for a row has the base's there.

    `cards` has C names for NVIDIA cards by the kernel's name.
    """
    found = cards or {}
    lines = ['#include "tile_kernel.h"', '#include "tile_features.h"']
    rows: list[str] = []
    for number, target in enumerate(targets):
        rows_of = [target.name if target.name in kernel.sources else target.base for kernel in kernels]
        names = [kernel_symbol(kernel.name, row) for kernel, row in zip(kernels, rows_of, strict=True)]
        lines += [f"extern const tile_kernel {name};" for name in names]
        table = ", ".join(f"&{name}" for name in names) or "NULL"
        lines.append(f"static const tile_kernel* const kernels_{number}[] = {{{table}}};")
        lines.append(f"static int32_t supported_{number}(void) {{ return ({target.supported}) != 0; }}")
        rows.append(f'{{"{target.name}", supported_{number}, {len(kernels)}, kernels_{number}}}')
    lines.append(f"static const tile_variant variants[] = {{{', '.join(rows)}}};")
    if found:
        lines += [
            '#include "tile_cuda.h"',
            *(f"extern const tile_cuda_kernel {name};" for name in sorted({*found.values()})),
        ]
        places = ", ".join(f"&{found[kernel.name]}" if kernel.name in found else "NULL" for kernel in kernels)
        lines.append(f"static const tile_cuda_kernel* const cards[] = {{{places}}};")
    lines.append('__attribute__((visibility("default"))) extern const tile_library tile_generated_library;')
    lines.append(f"const tile_library tile_generated_library = {{TILE_ABI_VERSION, {len(targets)}, variants, "
                 f"{'cards' if found else 'NULL'}}};")  # fmt: skip
    return "\n".join(lines) + "\n"
