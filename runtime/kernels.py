"""From a region's spec to its kernel, or why there is none: tuned extents, kernels written before, the compiler.

In: the kind and spec of a region. Out: a `Kernel`, or the reason for a miss. What was written is kept in the cache by
everything that it depends on: the spec, the machine, the instruction sets, the tuned configuration and the compiler's
own sources. A kernel in the cache is used only if its name, the hash of its texts, still fits them.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.fingerprint import compiler_fingerprint
from runtime.options import Options
from runtime.tuned import TunedStore, tuned_store
from tilecore.canonical import canonical
from tilecore.compile import PLACEHOLDER, Dump, Kernel, compile_spec, kernel_name, prepare
from tilecore.contract.spec import Spec
from tilecore.cuda.errors import CudaError
from tilecore.cuda.profile import A100, H100, GpuProfile
from tilecore.cuda.region import compile_region
from tilecore.emit_expr import EmitError
from tilecore.errors import TileError
from tilecore.infer import InferenceError
from tilecore.profile import HardwareProfile
from tilecore.recommend import NoConfigurationError
from tilecore.records import write_json
from tilecore.target import Target

LABELS = {"attention": "Attention", "contraction": "Contraction", "row": "Row", "scan": "Scan"}


@dataclass(frozen=True, slots=True)
class KernelWriter:
    """Makes kernels for one machine and some instruction sets; `kept` is the folder of those written before.

    Kernels that stand beside others for NVIDIA cards are `unpacked`: both read a weight as it lies in the model.
    """

    profile: HardwareProfile
    targets: tuple[Target, ...]
    tuned: TunedStore
    kept: Path
    dump: Dump | None = None
    use: Path | None = None
    unpacked: bool = False
    cubins: Path | None = None  # where cubins are kept, if kernels for NVIDIA cards are to be built too
    card: GpuProfile = H100  # that those are for

    def write(self, kind: str, spec: Spec) -> Kernel | str:
        """The kernel of a region of `kind`, or why the backend has none: that region then stays as it was."""
        kernel = self._written(kind, canonical(spec, constants=False) if self.unpacked else spec)
        if self.cubins is None or isinstance(kernel, str):
            return kernel
        try:
            label = f"Fused{LABELS[kind]}"
            cards = compile_region(spec, label=label, cache_directory=self.cubins, profile=self.card, dump=self.dump)
        except CudaError as error:
            return f"no kernel for NVIDIA cards: {error}"
        return replace(kernel, cards=cards)

    def _written(self, kind: str, spec: Spec) -> Kernel | str:
        config = self.tuned.best(spec)
        try:
            if self.dump is not None or self.use is not None:  # who looks at the stages wants them to run
                return self._edited(self._compile(kind, spec, config))
            path = self.kept / f"{self._key(kind, spec, config)}.json"
            kernel = _read(path, LABELS[kind], spec)
            if kernel is None:
                kernel = self._compile(kind, spec, config)
                _keep(path, kernel)
        except (EmitError, InferenceError, NoConfigurationError) as error:
            return str(error)
        except TileError as error:  # our kernels are written for every spec: a fault, and no reason to fuse less
            return f"a fault of TileFuse, please report the model: its kernel is refused: {error.message}"
        return kernel

    def _compile(self, kind: str, spec: Spec, config: Mapping[str, int] | None) -> Kernel:
        return compile_spec(
            spec, label=LABELS[kind], profile=self.profile, targets=self.targets, config=config, dump=self.dump
        )

    def _key(self, kind: str, spec: Spec, config: Mapping[str, int] | None) -> str:
        parts = (compiler_fingerprint(), kind, self.profile, self.targets, sorted((config or {}).items()), spec)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def _edited(self, kernel: Kernel) -> Kernel:
        """The kernel with the user's edited text in place of the generated one, if `use` names one of its dumps."""
        use = self.use
        if use is None:
            return kernel
        edited = {t: use.read_text() for t in kernel.sources if use.name == f"70_kernel_{kernel.name}_{t}.c"}
        return replace(kernel, sources={**kernel.sources, **edited})


CARD_PROFILES: Mapping[str, GpuProfile] = {"cuda": H100, "cuda-sm80": A100}  # by target


def card_profile(options: Options) -> GpuProfile:
    """The card that kernels are chosen for."""
    return CARD_PROFILES.get(options.target, H100)


def kernel_writer(
    options: Options, profile: HardwareProfile, targets: tuple[Target, ...], *, dump: Dump | None, cubins: bool
) -> KernelWriter:
    """The writer that `options` ask for; without `cubins` nothing is compiled to machine code."""
    return KernelWriter(
        profile,
        targets,
        tuned_store(options, profile.cores),
        options.cache / "kernels",
        dump,
        options.use,
        unpacked=options.cuda,
        cubins=options.cache / "cubins" if options.cuda and cubins else None,
        card=card_profile(options),
    )


def _read(path: Path, label: str, spec: Spec) -> Kernel | None:
    """The kernel of `spec` in a file; None when there is no file, or not a whole one: then it is written again."""
    try:
        found = json.loads(path.read_text())
        name, sources = str(found["name"]), {str(t): str(text) for t, text in found["sources"].items()}
        config = {str(extent): int(value) for extent, value in found["config"].items()}
        function, why = str(found["kernel"]), str(found["why"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if name != kernel_name(label, {target: text.replace(name, PLACEHOLDER) for target, text in sources.items()}):
        return None
    packed_spec, packed = prepare(spec)
    return Kernel(name, function, packed_spec, packed, config, sources, why)


def _keep(path: Path, kernel: Kernel) -> None:
    """Write a kernel for the next time."""
    fields = ("name", "kernel", "sources", "why")
    with suppress(OSError):  # a cache that cannot be written costs time here; building says what is wrong with it
        write_json(path, {name: getattr(kernel, name) for name in fields} | {"config": dict(kernel.config)})
