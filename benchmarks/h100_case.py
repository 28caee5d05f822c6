"""What is compared on a card: a case, its arrays, and the modules of peers that are installed."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Var, const
from tilecore.contract.spec import Spec, Tensor, outputs_of
from tilecore.cuda.compile import CudaKernel

if importlib.util.find_spec("torch") is None:
    raise SystemExit("kernels for cards are compared with torch's cuBLAS and cuDNN: pip install torch")
torch: Any = importlib.import_module("torch")  # untyped: machines without a card need not have it
PEAK = (
    989.4e12  # bf16 operations a second of an H100 or H200 at full clock, which the power cap does not allow for long
)
Arrays = dict[str, Any]
Run = Callable[[Arrays], Any]
TYPES = {DType.BF16: torch.bfloat16, DType.F16: torch.float16, DType.F32: torch.float32,
         DType.F8E4M3: torch.float8_e4m3fn, DType.BOOL: torch.bool}  # fmt: skip


class Missing:
    """A module of peers whose package is not there: what is called of it says so, and is left out by that."""

    def __init__(self, package: str) -> None:
        self.package = package

    def __getattr__(self, name: str) -> Any:
        raise ModuleNotFoundError(f"{self.package} is not installed")


def peers_of(package: str, module: str) -> Any:
    """A module of peers that call a package."""
    there = importlib.util.find_spec(package) is not None
    return importlib.import_module(module) if there else Missing(package)


triton: Any = peers_of("triton", "h100_triton")
tilelang: Any = peers_of("tilelang", "h100_tilelang")
quack: Any = peers_of("quack", "h100_cute")
flash: Any = peers_of("flash_attn", "h100_cute")


def named(**peers: tuple[Any, Run]) -> dict[str, Run]:
    """The peers that have such a kernel, which are those with a module; a name's underscores are spaces."""
    return {name.replace("_", " "): run for name, (module, run) in peers.items() if module is not None}


@dataclass(frozen=True)
class Tiles:
    """A kernel in the tile language with operands of its own: how to compile it, its arrays, its result's name."""

    compiled: Callable[..., CudaKernel]
    arrays: Callable[[], Arrays]
    output: str


@dataclass(frozen=True)
class Case:
    """What is compared: our spec or kernel, the peers by name, and the work of a call. `reference` gives the exact
    result in float32. `kind` is the row of the table; `given` are arrays that are not drawn from a normal distribution;
    `copies` move as many bytes and compute nothing.
    """

    kind: str
    name: str
    spec: Spec | Tiles
    reference: Run
    peers: Mapping[str, Run]
    flops: float = 0.0
    bytes: float = 0.0
    rate: float = PEAK
    given: Mapping[str, Callable[[], Any]] = field(default_factory=dict[str, Callable[[], Any]])
    copies: Mapping[str, Run] = field(default_factory=dict[str, Run])

    @property
    def output(self) -> str:
        """Name of the result."""
        return self.spec.output if isinstance(self.spec, Tiles) else outputs_of(self.spec)[0].name

    def arrays(self) -> Arrays:
        """Random inputs, and room for the output."""
        if isinstance(self.spec, Tiles):
            return self.spec.arrays()
        tensors = (*self.spec.inputs, *outputs_of(self.spec))
        return {one.name: self.given[one.name]() if one.name in self.given else normal(one) for one in tensors}


def normal(one: Tensor) -> Any:
    """Normally distributed elements; bytes evenly."""
    shape = [int(str(dim)) for dim in one.shape]
    if one.dtype is DType.U8:
        return torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)
    return torch.randn(*shape, device="cuda").to(TYPES[one.dtype])


def tensor(name: str, *shape: int, dtype: DType = DType.BF16) -> Tensor:
    return Tensor(name, dtype, tuple(const(dim) for dim in shape))


def axes(**extents: int) -> tuple[Var, ...]:
    return tuple(Var(name, extent=const(extent)) for name, extent in extents.items())
