"""Cases of attention: whole sequences with and without score programs, decode, decode from a latent cache."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from h100_case import Arrays, Case, Run, axes, flash, named, tensor, tilelang, torch, triton

from tilecore.contract.dtype import DType
from tilecore.contract.expr import Expr, Load, Var, binary, cast, const, select, unary
from tilecore.contract.spec import AttentionSpec, Place, Result, Tensor, View

backends: Any = importlib.import_module("torch.nn.attention")
TOKENS, MODEL = 16384, 2048  # of attention: batch times length, heads times width
LENGTHS = (512, 1024, 2048, 4096, 16384)
HALF_POINTS = ((128, 4096, False), (128, 4096, True), (64, 1024, True), (64, 4096, False))  # in f16, too
PROGRAMS = ("mask", "bias", "cap", "sink", "window", "slope")  # of scores
PROGRAM_LENGTH, WINDOW, CAP = 4096, 1024, 30.0
HEADS, SHARED, WIDTH = 32, 8, 128  # of decode
CACHES = ((1, 8192), (1, 32768), (2, 8192), (4, 8192), (16, 8192), (16, 32768), (64, 8192), (64, 32768))
LATENT, ROTARY, LATENT_HEADS = 512, 64, 128  # of decode from a latent cache
LATENT_CACHES = ((64, 8192), (128, 8192))


def cases(*, quick: bool) -> Iterator[Callable[[], Case]]:
    """Every case, made when its turn comes."""
    for width in (128, 64):
        for length in (1024, 4096) if quick else LENGTHS:
            for causal in (False, True):
                yield lambda width=width, length=length, causal=causal: attention_case(width, length, causal)
    for point in () if quick else HALF_POINTS:
        yield lambda point=point: attention_case(*point, dtype=DType.F16)
    for program in PROGRAMS[2:4] if quick else PROGRAMS:
        yield lambda program=program: program_case(program)
    for batch, keys in CACHES[::5] if quick else CACHES:
        yield lambda batch=batch, keys=keys: decode_case(batch, keys)
    for batch, keys in LATENT_CACHES[:1] if quick else LATENT_CACHES:
        yield lambda batch=batch, keys=keys: latent_case(batch, keys)


def attention_of(shape: tuple[int, ...], keys: tuple[int, ...], dtype: DType, causal: bool) -> AttentionSpec:
    """Attention of [B, H, S, D] over keys of [B, H', K, D]."""
    q, o = (tensor(name, *shape, dtype=dtype) for name in "qo")
    k, v = (tensor(name, *keys, dtype=dtype) for name in "kv")
    b, h, i, j, d, e = axes(b=shape[0], h=shape[1], i=shape[2], j=keys[2], d=shape[3], e=shape[3])
    raw, acc = Var("raw", DType.F32), Var("acc", DType.F32)
    score: Expr = raw * const(shape[3] ** -0.5, DType.F32)
    if causal:
        score = select(binary("le", j, i), score, const(-float("inf"), DType.F32))
    group = binary("floordiv", h, const(shape[1] // keys[1])) if shape[1] != keys[1] else h
    result = Result(Place(o, (b, h, i, e), (b, h, i, e)), cast(acc, dtype))
    views = (View("query", (b, h, i, d), Load(q, (b, h, i, d))), View("key", (b, h, j, d), Load(k, (b, group, j, d))),
             View("value", (b, h, j, e), Load(v, (b, group, j, e))))  # fmt: skip
    return AttentionSpec((q, k, v), *views, raw, (b, h, i, j), score, acc, (result,))


def exact(a: Arrays, **options: Any) -> Any:
    """In float32."""
    q, k, v = (a[name].float() for name in "qkv")
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def cudnn(a: Arrays, **options: Any) -> Any:
    with backends.sdpa_kernel(backends.SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(a["q"], a["k"], a["v"], **options)


def attention_case(width: int, length: int, causal: bool, *, dtype: DType = DType.BF16) -> Case:
    """Self-attention of `TOKENS` tokens in rows of `length`."""
    shape = (TOKENS // length, MODEL // width, length, width)
    peers = named(
        cuDNN=(torch, lambda a: cudnn(a, is_causal=causal)),
        FA4=(flash, lambda a: flash.attention(a, causal=causal)),
        TileLang=(tilelang, lambda a: tilelang.attention(a["q"], a["k"], a["v"], a["o"], causal)),
        Triton=(triton, lambda a: triton.attention(a["q"], a["k"], a["v"], a["o"], causal)),
    )
    flops = 4.0 * TOKENS * MODEL * length * (0.5 if causal else 1.0)
    kinds = f"{' causal' if causal else ''}{' f16' if dtype is DType.F16 else ''}"
    spec = attention_of(shape, shape, dtype, causal)
    name = f"attention D={width} S={length}{kinds}"
    return Case("attention", name, spec, lambda a: exact(a, is_causal=causal), peers, flops)


def program_case(program: str) -> Case:
    """Attention of width 128 with something done to its scores; without it, this is `attention D=128 S=4096`."""
    length, width = PROGRAM_LENGTH, 128
    shape = (TOKENS // length, MODEL // width, length, width)
    spec = attention_of(shape, shape, DType.BF16, causal=False)
    spec, given = _with_program(spec, program)
    flops = 4.0 * TOKENS * MODEL * length
    if program == "window":
        flops *= (WINDOW - WINDOW * WINDOW / 2 / length) / length
    name = f"attention D={width} S={length} {program}"
    return Case("program", name, spec, _program_reference(program), _program_peers(program), flops, given=given)


def _with_program(spec: AttentionSpec, program: str) -> tuple[AttentionSpec, dict[str, Callable[[], Any]]]:
    """The spec, and how to draw arrays that are not normally distributed."""
    b, h, i, j = spec.score_axes
    batch, heads, length, _ = (int(str(axis.extent)) for axis in spec.score_axes)
    score, lowest = spec.score, const(-float("inf"), DType.F32)

    def more(one: Tensor, new: Expr) -> AttentionSpec:
        return replace(spec, inputs=(*spec.inputs, one), score=new)

    if program == "mask":
        mask = tensor("mask", batch, length, dtype=DType.BOOL)
        ends = [length - 257 * number for number in range(batch)]
        drawn = lambda: torch.arange(length, device="cuda") < torch.tensor(ends, device="cuda")[:, None]  # noqa: E731
        return more(mask, select(Load(mask, (b, j)), score, lowest)), {"mask": drawn}
    if program == "bias":
        bias = tensor("bias", length, length)
        return more(bias, score + cast(Load(bias, (i, j)), DType.F32)), {}
    if program == "cap":
        inner = unary("tanh", score * const(1 / CAP, DType.F32))
        return replace(spec, score=inner * const(CAP, DType.F32)), {}
    if program == "slope":
        return replace(spec, score=score + cast(j - i, DType.F32) * const(2.0**-6, DType.F32)), {}
    if program == "sink":
        logits = tensor("sink", heads, dtype=DType.F32)
        return replace(spec, inputs=(*spec.inputs, logits), sink=View("sink", (b, h, i), Load(logits, (h,)))), {}
    near = binary("and", binary("le", j, i), binary("gt", j, i - WINDOW))
    return replace(spec, score=select(near, score, lowest)), {}


def _distance() -> Any:
    at = torch.arange(PROGRAM_LENGTH, device="cuda")
    return at[None, :] - at[:, None]


def _bias_of(program: str, a: Arrays) -> Any:
    """What scores take on, as an additive or boolean mask."""
    if program == "mask":
        return a["mask"][:, None, None, :]
    if program == "bias":
        return a["bias"]
    if program == "slope":
        return _distance() * 2.0**-6
    return (_distance() <= 0) & (_distance() > -WINDOW)


def _program_reference(program: str) -> Run:
    def of_scores(a: Arrays) -> Any:
        results: list[Any] = []
        for number in range(a["q"].shape[0]):
            q, k, v = (a[name][number].float() for name in "qkv")
            scores = q @ k.mT * q.shape[-1] ** -0.5
            if program == "cap":
                results.append(torch.softmax((scores / CAP).tanh() * CAP, -1) @ v)
            else:
                sinks = a["sink"][:, None, None].expand(*scores.shape[:2], 1)
                results.append(torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1] @ v)
        return torch.stack(results)

    def masked(a: Arrays) -> Any:
        bias = _bias_of(program, a)
        return exact(a, attn_mask=bias if bias.dtype is torch.bool else bias.float())

    return of_scores if program in ("cap", "sink") else masked


def _program_peers(program: str) -> dict[str, Run]:
    def by_mask(a: Arrays) -> Any:
        if "additive" not in a:
            bias = _bias_of(program, a)
            a["additive"] = bias if bias.dtype is torch.bool else bias.bfloat16()
        return cudnn(a, attn_mask=a["additive"])

    def sink(a: Arrays) -> Any:
        if "learned" not in a:
            a["learned"] = a["sink"].bfloat16()
        return flash.attention(a, learnable_sink=a["learned"])

    flashes: dict[str, Run] = {
        "cap": lambda a: flash.attention(a, softcap=CAP),
        "sink": sink,
        "window": lambda a: flash.attention(a, window_size=(WINDOW - 1, 0)),
    }
    found = {} if program in ("cap", "sink") else {"cuDNN": by_mask}
    return found | (named(FA4=(flash, flashes[program])) if program in flashes else {})


def decode_case(batch: int, keys: int) -> Case:
    """One query per head over a cache that groups of heads share."""
    spec = attention_of((batch, HEADS, 1, WIDTH), (batch, SHARED, keys, WIDTH), DType.F16, causal=False)
    operands = ("q", "k", "v", "o")
    peers = named(
        cuDNN=(torch, lambda a: cudnn(a, enable_gqa=True)),
        FA4=(flash, lambda a: flash.attention(a, num_splits=0 if batch * SHARED < 132 else 1)),
        TileLang=(tilelang, lambda a: tilelang.decode(*(a[name] for name in operands))),
        Triton=(triton, lambda a: triton.decode(*(a[name] for name in operands))),
    )

    def reference(a: Arrays) -> Any:
        """Batch by batch: keys in float32 take twice the room."""
        parts = [{name: a[name][at : at + 1] for name in "qkv"} for at in range(batch)]
        return torch.cat([exact(part, enable_gqa=True) for part in parts])

    moved = 4.0 * batch * SHARED * keys * WIDTH
    return Case("decode", f"decode B={batch} K={keys}", spec, reference, peers, bytes=moved)


def latent_case(batch: int, keys: int) -> Case:
    """One query per head over one cache of all heads, whose rows are keys and, as far as `LATENT` goes, values."""
    width, scale = LATENT + ROTARY, (LATENT // 4 + ROTARY) ** -0.5
    q, c = tensor("q", batch, LATENT_HEADS, 1, width, dtype=DType.F16), tensor("c", batch, keys, width, dtype=DType.F16)
    o = tensor("o", batch, LATENT_HEADS, 1, LATENT, dtype=DType.F16)
    b, h, i, j, d, e = axes(b=batch, h=LATENT_HEADS, i=1, j=keys, d=width, e=LATENT)
    raw, acc = Var("raw", DType.F32), Var("acc", DType.F32)
    views = (View("query", (b, h, i, d), Load(q, (b, h, i, d))), View("key", (b, h, j, d), Load(c, (b, j, d))),
             View("value", (b, h, j, e), Load(c, (b, j, e))))  # fmt: skip
    result = Result(Place(o, (b, h, i, e), (b, h, i, e)), cast(acc, DType.F16))
    spec = AttentionSpec((q, c), *views, raw, (b, h, i, j), raw * const(scale, DType.F32), acc, (result,))

    def matrices(a: Arrays) -> Any:
        queries, cache = a["q"][:, :, 0], a["c"]
        weights = torch.softmax(torch.baddbmm(queries.new_zeros(1), queries, cache.mT, beta=0, alpha=scale), -1)
        return torch.bmm(weights, cache[..., :LATENT], out=a["o"][:, :, 0])

    def reference(a: Arrays) -> Any:
        queries, cache = a["q"][:, :, 0].float(), a["c"].float()
        return (torch.softmax(queries @ cache.mT * scale, -1) @ cache[..., :LATENT])[:, :, None]

    peers = named(
        torch=(torch, matrices),
        TileLang=(tilelang, lambda a: tilelang.latent(a["q"], a["c"], a["o"], scale)),
        Triton=(triton, lambda a: triton.latent(a["q"], a["c"], a["o"], scale)),
    )
    flops, moved = 2.0 * batch * LATENT_HEADS * keys * (width + LATENT), 2.0 * batch * keys * width
    return Case("latent decode", f"latent decode B={batch} K={keys}", spec, reference, peers, flops, moved)
