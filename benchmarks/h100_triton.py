# ruff: noqa: ANN001, ANN201, ANN202
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
"""Triton's side of the comparison: attention and decode as its users write them, tuned over a few configurations."""

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
LOG2E_ = tl.constexpr(LOG2E)
CONFIGS = [
    triton.Config({"BM": 128, "BN": keys}, num_warps=warps, num_stages=stages)
    for keys, warps, stages in ((64, 4, 3), (64, 8, 3), (128, 8, 2), (128, 8, 3))
]


@triton.jit
def _tiles(q, k_rows, v_rows, top, total, out, rows, first, last, D: tl.constexpr, BN: tl.constexpr,
           MASKED: tl.constexpr):  # fmt: skip
    columns, depth = tl.arange(0, BN), tl.arange(0, D)
    for start in range(first, last, BN):
        keys = start + columns
        k = tl.load(k_rows + keys[:, None] * D + depth[None, :])
        scores = tl.dot(q, tl.trans(k))
        if MASKED:
            scores = tl.where(keys[None, :] <= rows[:, None], scores, -float("inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        rescale = tl.exp2(top - new)
        total = total * rescale + tl.sum(weights, 1)
        v = tl.load(v_rows + keys[:, None] * D + depth[None, :])
        out = tl.dot(weights.to(v.dtype), v, out * rescale[:, None])
        top = new
    return top, total, out


@triton.autotune(CONFIGS, key=["length", "CAUSAL", "D"])
@triton.jit
def _attention(q_at, k_at, v_at, o_at, scale, length, D: tl.constexpr, CAUSAL: tl.constexpr, BM: tl.constexpr,
               BN: tl.constexpr):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64) * length * D
    rows, depth = tile * BM + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(q_at + head + rows[:, None] * D + depth[None, :])
    q = (q * scale).to(q.dtype)
    top, total = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, D], tl.float32)
    whole = tile * BM if CAUSAL else length
    top, total, out = _tiles(q, k_at + head, v_at + head, top, total, out, rows, 0, whole, D, BN, False)
    if CAUSAL:
        top, total, out = _tiles(q, k_at + head, v_at + head, top, total, out, rows, whole, whole + BM, D, BN, True)
    tl.store(o_at + head + rows[:, None] * D + depth[None, :], (out / total[:, None]).to(o_at.dtype.element_ty))


def attention(q, k, v, out, causal):
    """Self-attention of [B, H, S, D]; S a multiple of 128."""
    batch, heads, length, width = q.shape

    def grid(meta):
        return length // meta["BM"], batch * heads

    _attention[grid](q, k, v, out, width**-0.5 * LOG2E, length, width, causal)
    return out


@triton.jit
def _part(q_at, k_at, v_at, parts_at, top_at, total_at, scale, keys, each, GROUP: tl.constexpr, D: tl.constexpr,
          BN: tl.constexpr):  # fmt: skip
    head, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    rows, depth = tl.arange(0, 16), tl.arange(0, D)
    q = tl.load(q_at + head * GROUP * D + rows[:, None] * D + depth[None, :], mask=rows[:, None] < GROUP, other=0.0)
    q = (q * scale).to(q.dtype)
    base = head.to(tl.int64) * keys * D
    top, total = tl.full([16], -float("inf"), tl.float32), tl.zeros([16], tl.float32)
    out = tl.zeros([16, D], tl.float32)
    first, last = part * each, (part + 1) * each
    top, total, out = _tiles(q, k_at + base, v_at + base, top, total, out, rows, first, last, D, BN, False)
    at = (head * parts + part) * 16 + rows
    tl.store(parts_at + at[:, None] * D + depth[None, :], out)
    tl.store(top_at + at, top)
    tl.store(total_at + at, total)


@triton.jit
def _joined(parts_at, top_at, total_at, o_at, GROUP: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr):
    head, row = tl.program_id(0), tl.program_id(1)
    part, depth = tl.arange(0, PARTS), tl.arange(0, D)
    at = (head * PARTS + part) * 16 + row
    top = tl.load(top_at + at)
    weights = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(tl.load(total_at + at) * weights, 0)
    out = tl.sum(tl.load(parts_at + at[:, None] * D + depth[None, :]) * weights[:, None], 0)
    tl.store(o_at + (head * GROUP + row) * D + depth, (out / total).to(o_at.dtype.element_ty))


def decode(q, k, v, out):
    """One query per head of [B, H, 1, D] over [B, H / 4, K, D]: parts of the keys, then their sum."""
    batch, shared, keys, width = k.shape
    group = q.shape[1] // shared
    parts = 1
    while batch * shared * parts < 264 and keys // (parts * 2) >= 256:
        parts *= 2
    room = torch.empty(batch * shared * parts * 16, width, device=q.device)
    tops, totals = (torch.empty(batch * shared * parts * 16, device=q.device) for _ in range(2))
    grid = (batch * shared, parts)
    _part[grid](q, k, v, room, tops, totals, width**-0.5 * LOG2E, keys, keys // parts, group, width, 64, num_stages=4)
    _joined[(batch * shared, group)](room, tops, totals, out, group, width, parts)
    return out


LATENT = [
    triton.Config({"BH": heads, "BN": keys}, num_warps=warps, num_stages=stages)
    for heads, keys, warps, stages in ((16, 32, 4, 2), (64, 32, 8, 2), (64, 64, 8, 1))
]


@triton.autotune(LATENT, key=["length"])
@triton.jit
def _latent(q_at, c_at, o_at, scale, length, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BH: tl.constexpr,
            BN: tl.constexpr):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    heads, columns = tl.program_id(0) * BH + tl.arange(0, BH), tl.arange(0, BN)
    depth, rotary = tl.arange(0, D), D + tl.arange(0, R)
    q_rows = q_at + (batch * H + heads)[:, None] * (D + R)
    q, q_rotary = tl.load(q_rows + depth[None, :]), tl.load(q_rows + rotary[None, :])
    top, total = tl.full([BH], -float("inf"), tl.float32), tl.zeros([BH], tl.float32)
    out = tl.zeros([BH, D], tl.float32)
    for start in range(0, length, BN):
        keys = start + columns
        c_rows = c_at + (batch * length + keys)[:, None] * (D + R)
        c = tl.load(c_rows + depth[None, :])
        scores = tl.dot(q_rotary, tl.trans(tl.load(c_rows + rotary[None, :])), tl.dot(q, tl.trans(c))) * scale
        new = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        rescale = tl.exp2(top - new)
        total = total * rescale + tl.sum(weights, 1)
        out = tl.dot(weights.to(c.dtype), c, out * rescale[:, None])
        top = new
    o_rows = o_at + (batch * H + heads)[:, None] * D
    tl.store(o_rows + depth[None, :], (out / total[:, None]).to(o_at.dtype.element_ty))


def latent(q, c, out, scale):
    """One query per head of [B, H, 1, D + R] over one cache [B, K, D + R] of all heads; values are its first D."""
    batch, heads, _, width = q.shape
    deep = out.shape[3]

    def grid(meta):
        return heads // meta["BH"], batch

    _latent[grid](q, c, out, scale * LOG2E, c.shape[1], heads, deep, width - deep)
    return out


LINEAR = [
    triton.Config({"C": steps, "BE": columns}, num_warps=warps, num_stages=stages)
    for steps, columns, warps, stages in (
        (64, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (32, 128, 4, 3), (128, 64, 8, 2),
        (64, 32, 4, 3),
    )
]  # fmt: skip


@triton.autotune(LINEAR, key=["steps", "GATED"])
@triton.jit
def _linear(q_at, k_at, v_at, o_at, decay_at, weight_at, scale, steps, H: tl.constexpr, D: tl.constexpr,
            E: tl.constexpr, GATED: tl.constexpr, C: tl.constexpr, BE: tl.constexpr):  # fmt: skip
    batch, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    depth, columns = tl.arange(0, D), tl.program_id(0) * BE + tl.arange(0, BE)
    at = tl.arange(0, C)
    state = tl.zeros([D, BE], tl.float32)
    for first in range(0, steps, C):
        lines = (batch * steps + first + at) * H + head
        rows = lines[:, None]
        q, k = tl.load(q_at + rows * D + depth[None, :]), tl.load(k_at + rows * D + depth[None, :])
        v = tl.load(v_at + rows * E + columns[None, :])
        scores = tl.where(at[:, None] >= at[None, :], tl.dot(q, tl.trans(k)), 0.0)
        if GATED:
            weight, decay = tl.load(weight_at + lines), tl.load(decay_at + lines) * LOG2E_
            sums, whole = tl.cumsum(decay, 0), tl.sum(decay, 0)
            scores = scores * tl.exp2(tl.minimum(sums[:, None] - sums[None, :], 0.0)) * weight[None, :]
            out = tl.dot(q, state.to(q.dtype)) * tl.exp2(sums)[:, None]
            out = tl.dot(scores.to(v.dtype), v, out)
            state = state * tl.exp2(whole)
            v = (v * (weight * tl.exp2(whole - sums))[:, None]).to(v.dtype)
        else:
            out = tl.dot(q, state.to(q.dtype), tl.dot(scores.to(v.dtype), v))
        tl.store(o_at + rows * E + columns[None, :], (out * scale).to(o_at.dtype.element_ty))
        state = tl.dot(tl.trans(k), v, state)


def linear(q, k, v, out, scale, decay=None, weight=None):
    """Causal linear attention of [B, S, H, D], S a multiple of 128; decays (logarithms) and weights are [B, S, H]."""
    batch, steps, heads, depth = q.shape
    width = v.shape[3]

    def grid(meta):
        return width // meta["BE"], batch * heads

    gated = decay is not None
    _linear[grid](q, k, v, out, decay if gated else q, weight if gated else q, scale, steps, heads, depth, width, gated)
    return out


SCAN = [
    triton.Config({"BM": rows, "BK": steps}, num_warps=warps, num_stages=stages)
    for rows, steps, warps, stages in (
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 4), (128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 4, 3),
        (128, 32, 4, 4), (256, 64, 8, 2),
    )
]  # fmt: skip


@triton.autotune(SCAN, key=["steps"])
@triton.jit
def _chunk_scan(cb_at, x_at, dt_at, da_at, c_at, state_at, d_at, o_at, steps, H: tl.constexpr, P: tl.constexpr,
                N: tl.constexpr, L: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    head, chunks = tl.program_id(1), steps // L
    batch, chunk = (tl.program_id(2) // chunks).to(tl.int64), tl.program_id(2) % chunks
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, P)
    depth, inner = tl.arange(0, N), tl.arange(0, BK)
    line = ((batch * H + head) * chunks + chunk) * L
    own = tl.load(da_at + line + rows).to(tl.float32) * 1.4426950408889634
    first = batch * steps + chunk * L
    c = tl.load(c_at + (first + rows)[:, None] * N + depth[None, :])
    state = tl.load(state_at + (((batch * chunks + chunk) * H + head) * P + columns)[None, :] * N + depth[:, None])
    out = tl.dot(c, state) * tl.exp2(own)[:, None]
    for start in range(0, (tl.program_id(0) + 1) * BM, BK):
        at = start + inner
        cb = tl.load(cb_at + ((batch * chunks + chunk) * L + rows)[:, None] * L + at[None, :]).to(tl.float32)
        decay = tl.load(da_at + line + at).to(tl.float32) * 1.4426950408889634
        step = tl.load(dt_at + line + at).to(tl.float32)
        weights = cb * tl.exp2(own[:, None] - decay[None, :]) * step[None, :]
        weights = tl.where(rows[:, None] >= at[None, :], weights, 0.0)
        x = tl.load(x_at + ((first + at) * H + head)[:, None] * P + columns[None, :])
        out = tl.dot(weights.to(x.dtype), x, out)
    here = ((first + rows) * H + head)[:, None] * P + columns[None, :]
    out += tl.load(x_at + here).to(tl.float32) * tl.load(d_at + head).to(tl.float32)
    tl.store(o_at + here, out.to(o_at.dtype.element_ty))


def chunk_scan(cb, x, dt, da, c, states, d, out):
    """Mamba-2's scan inside chunks, one group; S a multiple of the chunk."""
    batch, steps, heads, width = x.shape
    length = cb.shape[3]

    def grid(meta):
        return length // meta["BM"], heads, batch * (steps // length)

    _chunk_scan[grid](cb, x, dt, da, c, states, d, out, steps, heads, width, c.shape[3], length)
    return out


LEVELS = [
    triton.Config({"BM": rows, "BN": columns, "BK": depth}, num_warps=warps, num_stages=stages)
    for rows, columns, depth, warps, stages in (
        (16, 32, 128, 4, 5), (16, 64, 128, 4, 4), (64, 64, 128, 4, 3), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3),
    )
]  # fmt: skip


@triton.autotune(LEVELS, key=["M"])
@triton.jit
def _levels(x_at, levels_at, scale_at, zero_at, y_at, M, N, K, BITS: tl.constexpr, GROUP: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    rows, columns, depth = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), BK
    each: tl.constexpr = 8 // BITS
    packed = tl.arange(0, BK // each)
    out = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, depth):
        inner = start + tl.arange(0, BK)
        x = tl.load(x_at + rows[:, None] * K + inner[None, :], mask=rows[:, None] < M, other=0.0)
        level = tl.load(levels_at + columns[:, None] * (K // each) + start // each + packed[None, :])
        number = start // GROUP
        zero = tl.load(zero_at + columns * (K // GROUP // each) + number // each)
        if BITS == 4:
            level = tl.join(level & 15, level >> 4).reshape(BN, BK)
            zero = (zero >> (number % 2 * 4)) & 15
        scale = tl.load(scale_at + columns * (K // GROUP) + number)
        real = (level.to(tl.float32) - zero.to(tl.float32)[:, None]) * scale.to(tl.float32)[:, None]
        out = tl.dot(x, tl.trans(real.to(x.dtype)), out)
    at = y_at + rows[:, None] * N + columns[None, :]
    tl.store(at, out.to(y_at.dtype.element_ty), mask=rows[:, None] < M)


def levels(x, packed, scale, zero, out, bits, group):
    """x [M, K] by weights [N, K] of `bits` bits, with a scale and a packed zero point per `group` of the depth."""
    rows, depth = x.shape
    columns = scale.shape[0]

    def grid(meta):
        return columns // meta["BN"], triton.cdiv(rows, meta["BM"])

    _levels[grid](x, packed, scale, zero, out, rows, columns, depth, bits, group)
    return out
