"""Linking: kernels and a host's objects → one shared library with a variant per instruction set.

Objects are built by threads in the background, and may be started as soon as their text is known: what writes kernels
and the C compiler then work at the same time.

The generated `library.c` is the table of `tile_kernel.h`; whoever hosts the kernels (the custom-op shim, the Python
callable) adds its own sources.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Protocol

from tilecore.commands import Commands
from tilecore.compile import HEADERS
from tilecore.emit_host import kernel_symbol
from tilecore.emit_product import shared_units
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


class Objects:
    """Objects in the making: each source is built once, in the order of asking.

    Leaving it drops what has not begun; leaving it by an error ends the compilers that run, too.
    """

    def __init__(self, toolchain: Callable[[], Toolchain], workers: int = 2) -> None:
        self.toolchain = toolchain  # asked for when something is to be built: BuildError if there is none
        self._commands = Commands()
        self._pool = ThreadPoolExecutor(workers)
        self._begun: dict[Source, Future[Path]] = {}

    def __enter__(self) -> "Objects":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._commands.stop()
        self._pool.shutdown(cancel_futures=True)

    def start(self, source: Source) -> Future[Path]:
        """The object of `source`, or what was wrong, when it is there."""
        if source not in self._begun:
            self._begun[source] = self._pool.submit(lambda: self._object(source))
        return self._begun[source]

    def _object(self, source: Source) -> Path:
        return replace(self.toolchain(), commands=self._commands).object(source)

    def start_kernel(self, kernel: Linkable, targets: Sequence[Target]) -> list[tuple[Target, Future[Path]]]:
        """The objects of a kernel's own texts; those of what it shares with others are begun too, before them."""
        rows = [target for target in targets if target.name in kernel.sources]
        for target in rows:
            self.start_shared([kernel], target)
        return [(t, self.start(Source(kernel.sources[t.name], t.flags, (HEADERS,)))) for t in rows]

    def start_shared(self, kernels: Sequence[Linkable], target: Target) -> list[Future[Path]]:
        """The objects of what `kernels` share on one target."""
        units = shared_units([k.sources[target.name] for k in kernels if target.name in k.sources], target)
        return [self.start(Source(unit.text, target.flags, (HEADERS,))) for unit in units]


def link_kernels(
    kernels: Sequence[Linkable],
    targets: Sequence[Target],
    objects: Objects,
    *,
    cards: Mapping[str, str] | None = None,
    host: Sequence[Source] = (),
    from_memory: bool = False,
) -> Path:
    """The library of `kernels` (distinct names) for `targets`, with the `host`; built at most once per content.

    `from_memory`: their weights do not fit the last cache together: products of one row walk more panels at once.
    `cards` has the C names of what some have for NVIDIA cards, by the kernel's name; `host` defines them.

    KernelBuildError names every kernel that the compiler refuses; BrokenToolchainError says why nothing can be built.
    """
    toolchain = objects.toolchain()
    targets = [target for target in targets if not kernels or any(target.name in kernel.sources for kernel in kernels)]
    begun = [(kernel, *one) for kernel in kernels for one in objects.start_kernel(kernel, targets)]
    table = Source(library_source(kernels, targets, cards, from_memory=from_memory), include=(HEADERS,))
    others = [
        *chain.from_iterable(objects.start_shared(kernels, target) for target in targets),
        *map(objects.start, (table, *host)),
    ]
    built: list[Path] = []
    problems: dict[str, str] = {}
    for kernel, target, made in begun:
        try:
            built.append(made.result())
        except BrokenToolchainError:
            raise
        except BuildError as error:
            problems[kernel.name] = f"{target.name}: {error}"
    if problems:
        raise KernelBuildError(problems)
    return toolchain.library([*built, *(made.result() for made in others)])


def from_memory_source(from_memory: bool) -> str:
    """The C definition that products of one row ask where their weights come from."""
    return f"extern const int32_t tile_from_memory;\nconst int32_t tile_from_memory = {int(from_memory)};"


def library_source(
    kernels: Sequence[Linkable],
    targets: Sequence[Target],
    cards: Mapping[str, str] | None = None,
    *,
    from_memory: bool = False,
) -> str:
    """The C text that defines `tile_generated_library`. A kernel without text for a row has the base's there.

    `cards` has C names for NVIDIA cards by the kernel's name.
    """
    found = cards or {}
    lines = ['#include "tile_kernel.h"', '#include "tile_features.h"', from_memory_source(from_memory)]
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
