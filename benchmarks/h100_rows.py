"""Cases of recurrences and of programs over rows."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from h100_case import Arrays, Case, Run, Tiles, axes, named, quack, tensor, tilelang, torch, triton

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Var, binary, cast, const, select, unary
from tilecore.contract.spec import Cell, Place, Result, RowSpec, ScanSpec, State, Step, Tensor, Total
from tilecore.cuda.chunked import compile_chunk_scan
from tilecore.cuda.compile import CudaKernel

HEADS, WIDTH = 32, 128
LINEAR, LINEAR_BATCH = (1024, 4096), 8  # of linear attention: steps, with HEADS heads of WIDTH columns
SCAN_HEADS, SCAN_WIDTH, SCAN_STATE, CHUNK = 80, 64, 128, 256  # of Mamba-2's chunk scan, 8 x 4096 steps
ROWS, COLUMNS, POSITIONS = 8192, 4096, 2048
KINDS = ("rmsnorm", "layernorm", "softmax", "swiglu", "rope")


def cases(*, quick: bool) -> Iterator[Callable[[], Case]]:
    """Every case, made when its turn comes."""
    for length in LINEAR[:1] if quick else LINEAR:
        for gated in (False, True):
            yield lambda length=length, gated=gated: linear_case(length, gated=gated)
    yield scan_case
    for kind in KINDS[::2] if quick else KINDS:
        yield lambda kind=kind: row_case(kind)


def linear_case(length: int, *, gated: bool) -> Case:
    """Linear attention of f16 [B, S, H, D], scaled as softmax's scores are; gated with a decay and a weight, both f32,
    of each head and step.
    """
    B, scale, shape = LINEAR_BATCH, WIDTH**-0.5, (LINEAR_BATCH, length, HEADS, WIDTH)
    g, t, d, e, over, query = axes(g=B * HEADS, t=length, d=WIDTH, e=WIDTH, over=WIDTH, query=1)
    q, k, v, o = (tensor(name, *shape, dtype=DType.F16) for name in "qkvo")
    gates = tuple(tensor(name, B, length, HEADS, dtype=DType.F32) for name in ("decay", "weight")) if gated else ()
    extents = tuple(const(extent) for extent in (B * HEADS, WIDTH, WIDTH))
    old, new = (Cell(name, DType.F32, extents) for name in ("s", "s.next"))
    read = Cell("r", DType.F32, (extents[0], extents[2]))

    def at(one: Tensor, column: Var) -> Expr:
        return cast(Load(one, (g // HEADS, t, g % HEADS, column)), DType.F32)

    kept: Expr = Load(old, (g, d, e))
    added = at(k, d) * at(v, e)
    if gated:
        decay, weight = (Load(one, (g // HEADS, t, g % HEADS)) for one in gates)
        kept, added = kept * unary("exp", decay), weight * added
    state = State(old, new, (d, e), const(0.0, DType.F32), kept + added)
    total = Total(read, (e,), over, "sum", at(q, over) * Load(new, (g, over, e)))
    value = cast(Load(read, (g, e)) * const(scale, DType.F32), DType.F16)
    result = Result(Place(o, (g, t, e), (g // HEADS, t, g % HEADS, e)), value)
    spec = ScanSpec((q, k, v, *gates), g, t, e, (state,), (total,), query, (), (result,))
    drawn = {
        "decay": lambda: -torch.rand(B, length, HEADS, device="cuda") * 0.1,
        "weight": lambda: torch.rand(B, length, HEADS, device="cuda"),
    }

    def operands(a: Arrays) -> tuple[Any, ...]:
        return (*(a[name] for name in "qkvo"), scale, *(a[one.name] for one in gates))

    peers = named(
        TileLang=(None if gated else tilelang, lambda a: tilelang.linear(*operands(a))),
        Triton=(triton, lambda a: triton.linear(*operands(a))),
    )
    tokens = float(B * length * HEADS)
    flops = 2.0 * tokens * WIDTH * (64 + 2 * WIDTH)  # half of the scores of chunks of 64 steps, states in and out
    moved = (8.0 * WIDTH + 8.0 * gated) * tokens
    name = f"linear attention S={length}{' gated' if gated else ''}"
    return Case("linear", name, spec, lambda a: _recurred(a, scale), peers, flops, moved, given=drawn)


def _recurred(a: Arrays, scale: float) -> Any:
    """Linear attention in float32, chunk by chunk."""
    q, k, v = (a[name].float().transpose(1, 2).unflatten(2, (-1, 64)) for name in "qkv")
    gates = ("decay" in a) and (a[name].transpose(1, 2).unflatten(2, (-1, 64)) for name in ("decay", "weight"))
    decay, weight = gates or (torch.zeros(q.shape[:-1], device=q.device), torch.ones(q.shape[:-1], device=q.device))
    sums = decay.cumsum(-1)
    apart = (sums[..., :, None] - sums[..., None, :]).clamp(max=0).exp() * weight[..., None, :]
    inside = (q @ k.mT * apart).tril() @ v
    added = (k * (weight * (sums[..., -1:] - sums).exp())[..., None]).mT @ v
    state, before = torch.zeros_like(added[:, :, 0]), list[Any]()
    for chunk in range(added.shape[2]):
        before.append(state)
        state = state * sums[:, :, chunk, -1].exp()[..., None, None] + added[:, :, chunk]
    outside = q @ torch.stack(before, 2) * sums.exp()[..., None]
    return ((inside + outside) * scale).flatten(2, 3).transpose(1, 2)


def scan_case() -> Case:
    """The chunk scan of Mamba-2, f16, all of its vectors too."""
    B, S, H, P, N, L = LINEAR_BATCH, LINEAR[-1], SCAN_HEADS, SCAN_WIDTH, SCAN_STATE, CHUNK
    chunks = S // L
    shapes = {"cb": (B, chunks, 1, L, L), "x": (B, S, H, P), "dt": (B, H, chunks, L), "da": (B, H, chunks, L),
              "c": (B, S, 1, N), "states": (B, chunks, H, P, N), "d": (H,), "o": (B, S, H, P)}  # fmt: skip
    given = {name: tensor(name, *shape, dtype=DType.F16) for name, shape in shapes.items()}
    names = {"CB": "cb", "X": "x", "dt": "dt", "dA": "da", "C": "c", "states": "states", "D": "d", "out": "o"}
    operands = {parameter: given[name] for parameter, name in names.items()}

    def arrays() -> Arrays:
        found = {name: torch.randn(shape, device="cuda", dtype=torch.float16) for name, shape in shapes.items()}
        found["dt"] = torch.rand(shapes["dt"], device="cuda").half()
        found["da"] = -(torch.rand(shapes["da"], device="cuda") * 0.05).cumsum(-1).half()
        return found

    def exact(found: Arrays) -> Any:
        """In float32, sequence by sequence."""
        results: list[Any] = []
        for b in range(B):
            cb, x, dt, da, c, states = (found[name][b].float() for name in ("cb", "x", "dt", "da", "c", "states"))
            apart = (da[..., :, None] - da[..., None, :]).clamp(max=0).exp()  # [H, chunks, L, L]
            weights = (cb[:, 0] * apart * dt[..., None, :]).tril()
            x = x.unflatten(0, (chunks, L)).permute(2, 0, 1, 3)
            before = c[:, 0].unflatten(0, (chunks, L)) @ states.transpose(0, 1).mT
            out = weights @ x + da.exp()[..., None] * before + found["d"].float()[:, None, None, None] * x
            results.append(out.permute(1, 2, 0, 3).flatten(0, 1))
        return torch.stack(results)

    def compiled(**options: Any) -> CudaKernel:
        return compile_chunk_scan(operands, **options)

    peers = named(
        TileLang=(tilelang, lambda a: tilelang.chunk_scan(*(a[name] for name in shapes))),
        Triton=(triton, lambda a: triton.chunk_scan(*(a[name] for name in shapes))),
    )
    tokens = float(B * S * H)
    moved = 2.0 * sum(math.prod(shape) for shape in shapes.values())
    flops = 2.0 * tokens * P * (L / 2 + N)
    return Case("scan", "Mamba-2 chunk scan", Tiles(compiled, arrays, "o"), exact, peers, flops, moved)


def row_case(kind: str) -> Case:
    """A program over rows of `COLUMNS`, or of heads for the rotary embedding; a copy moves as many bytes."""
    rows, columns = (ROWS * COLUMNS // WIDTH, WIDTH) if kind == "rope" else (ROWS, COLUMNS)
    r, c = axes(r=rows, c=columns)
    x, y = tensor("x", rows, columns), tensor("y", rows, columns)
    inputs, steps, value = [x], list[Step](), cast(Load(x, (r, c)), DType.F32)
    size = float(columns)

    def more(name: str, *shape: int) -> Expr:
        inputs.append(tensor(name, *shape))
        index = {1: (c,), 2: (r % POSITIONS if kind == "rope" else r, c)}[len(shape)]
        return cast(Load(inputs[-1], index), DType.F32)

    def step(name: str, how: str, what: Expr) -> Expr:
        steps.append(Step(Var(name, DType.F32), how, what))
        return steps[-1].var

    match kind:
        case "rmsnorm":
            scale = unary("rsqrt", step("squares", "sum", value * value) / size + 1e-5)
            result = value * scale * more("weight", columns)
        case "layernorm":
            centred = step("centred", "tile", value - step("total", "sum", value) / size)
            scale = unary("rsqrt", step("squares", "sum", centred * centred) / size + 1e-5)
            result = centred * scale * more("weight", columns) + more("bias", columns)
        case "softmax":
            weight = step("weight", "tile", unary("exp", value - step("top", "max", value)))
            result = weight / step("total", "sum", weight)
        case "swiglu":
            result = value * unary("sigmoid", value) * more("up", rows, columns)
        case _:
            half = columns // 2
            other = select(binary("lt", c, const(half)), unary("neg", cast(Load(x, (r, c + half)), DType.F32)),
                           cast(Load(x, (r, c - half)), DType.F32))  # fmt: skip
            result = value * more("cos", POSITIONS, columns) + other * more("sin", POSITIONS, columns)
    spec = RowSpec(tuple(inputs), r, c, tuple(steps), (Result(Place(y, (r, c), (r, c)), cast(result, DType.BF16)),))
    streams = 3 if kind == "swiglu" else 2
    copy = _copy_of_three if streams == 3 else lambda a: a["y"].copy_(a["x"])
    moved, peers = 2.0 * streams * rows * columns, _row_peers(kind)
    return Case("rows", f"rows {kind}", spec, REFERENCES[kind], peers, bytes=moved, copies={"copy": copy})


def _row_peers(kind: str) -> dict[str, Run]:
    found = named(
        rmsnorm=(tilelang, lambda a: tilelang.rmsnorm(a["x"], a["weight"], a["y"])),
        softmax=(tilelang, lambda a: tilelang.softmax(a["x"], a["y"])),
    )
    peers = {"TileLang": found[kind]} if kind in found else {}
    if kind in ("rmsnorm", "layernorm", "softmax"):
        peers["quack"] = lambda a: getattr(quack, kind)(a)
    return peers


def _rotated(arrays: Arrays) -> Any:
    x, half = arrays["x"].float(), WIDTH // 2
    cos, sin = (arrays[name].float().repeat(x.shape[0] // POSITIONS, 1) for name in ("cos", "sin"))
    return x * cos + torch.cat([-x[:, half:], x[:, :half]], -1) * sin


REFERENCES: dict[str, Callable[[Arrays], Any]] = {
    "rmsnorm": lambda a: torch.nn.functional.rms_norm(a["x"].float(), (COLUMNS,), a["weight"].float(), 1e-5),
    "layernorm": lambda a: torch.nn.functional.layer_norm(
        a["x"].float(), (COLUMNS,), a["weight"].float(), a["bias"].float(), 1e-5
    ),
    "softmax": lambda a: torch.softmax(a["x"].float(), -1),
    "swiglu": lambda a: torch.nn.functional.silu(a["x"].float()) * a["up"].float(),
    "rope": _rotated,
}


def _copy_of_three(arrays: Arrays) -> Any:
    return torch.add(arrays["x"], arrays["up"], out=arrays["y"])  # two read, one written
