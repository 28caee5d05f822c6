"""The text form of programs: every statement kind, and the three library kernels whole."""

from typing import Any

import numpy as np
from kernel_texts import program_of
from tile_specs import AttentionForm, attention_case, contraction_case, row_case

from tilecore import language as T
from tilecore.contract.spec import Spec
from tilecore.language import Handle
from tilecore.library import kernel_for
from tilecore.printer import print_program
from tilecore.trace import trace


def printed(spec: Spec, **extents: int) -> str:
    kernel, operands = kernel_for(spec)
    return print_program(trace(kernel, inputs=spec.inputs, operands=operands, extents=extents or None))


def test_every_statement_has_a_form() -> None:
    def kernel(A: Handle, C: Handle, block: Any = T.auto) -> None:
        with T.Kernel(T.ceildiv(8, block), threads=64) as m:
            a = T.alloc_shared((block, 8), T.float32)
            c = T.alloc_fragment((block, block), T.float32)
            t = T.alloc_fragment((block,), T.float32)
            T.copy(A[m * block, 0], a)
            T.clear(t)
            for n in T.Pipelined(1, 3, num_stages=3):
                T.gemm(a, a, c, transpose_B=True, clear=True)
                T.reduce_max(c, t, dim=0, clear=False)
                with T.If(n > 1):
                    T.fill(t, -T.infinity)
                with T.Else():
                    T.reduce_sum(c, t)
            for i in T.Parallel(block):
                C[m * block + i, 0] = T.if_then_else(t[i] > 0, T.exp2(t[i]), 0.5)

    assert (
        print_program(program_of(kernel))
        == """\
kernel kernel(A: f32[8, 8]) -> (C: f32[8, 8])
  tunable block
  view A[A_0 < 8, A_1 < 8]: f32 = A[A_0, A_1]
  place C[C_0 < 8, C_1 < 8]: f32 -> C[C_0, C_1]
  shared a: f32[block, 8]
  fragment c: f32[block, block]
  fragment t: f32[block]
  grid m < ((7 // block) + 1) threads=64
    copy a = A[(block * m) : +block, 0 : +8]
    fill t = f32(0.0)
    for n in 0 .. 2 pipelined stages=3
      gemm c = a · aᵀ
      reduce t with= max(c, axis=0)
      if ((n + 1) > 1)
        fill t = f32(-inf)
      else
        reduce t = sum(c, axis=1)
    parallel i < block
      C[((block * m) + i), 0] = select((t[i] > f32(0.0)), exp2(t[i]), f32(0.5))
"""
    )


def test_matmul() -> None:
    case = contraction_case(1, rows=4, columns=6, depth=5)
    assert (
        printed(case.spec)
        == """\
kernel matmul(a: f32[M, G, 5], b: f32[6, 5], bias: f32[6], residual: f32[G, M, 6]) -> (c: f32[G, M, 6])
  tunable block_m, block_n, block_k
  view A[g < G, m < M, k < 5]: f32 = (a[m, g, k] * f32(2.0))
  view B[g < G, k < 5, n < 6]: f32 = b[n, k]
  place c[g < G, m < M, n < 6]: f32 -> c[g, m, n]
  shared a1: f32[block_m, block_k]
  shared b1: f32[block_k, block_n]
  fragment c1: f32[block_m, block_n]
  grid m < (((M + -1) // block_m) + 1), n < ((5 // block_n) + 1), g < G
    fill c1 = f32(0.0)
    for k in 0 .. ((4 // block_k) + 1) pipelined stages=2
      copy a1 = A[g, (block_m * m) : +block_m, (block_k * k) : +block_k]
      copy b1 = B[g, (block_k * k) : +block_k, (block_n * n) : +block_n]
      gemm c1 += a1 · b1
    parallel i < block_m, j < block_n
      c[g, ((block_m * m) + i), ((block_n * n) + j)] = (c1[i, j] + bias[((block_n * n) + j)])
"""
    )


def test_row() -> None:
    case = row_case("softmax", rows=4, columns=6, dynamic=True)
    assert (
        printed(case.spec, block_m=4)
        == """\
kernel row(x: f32[R, C], skip: f32[R, C], gamma: f32[C]) -> (y: f32[R, C])
  place y[r < R, c < C]: f32 -> y[r, c]
  fragment tile: f32[4, C]
  fragment result: f32[4]
  fragment tile1: f32[4, C]
  fragment result1: f32[4]
  grid m < ((R + 3) // 4)
    parallel i < 4, j < C
      tile[i, j] = x[(i + (m * 4)), j]
    reduce result = max(tile, axis=1)
    parallel i1 < 4, j1 < C
      tile1[i1, j1] = exp((x[(i1 + (m * 4)), j1] - result[i1]))
    reduce result1 = sum(tile1, axis=1)
    parallel i2 < 4, j2 < C
      y[(i2 + (m * 4)), j2] = (tile1[i2, j2] / result1[i2])
"""
    )


ATTENTION = """\
kernel attention(xq: f32[B, Q, 8], xk: f32[B, K, 2, 4], xv: f32[B, 2, K, 5]) -> (out: f32[B, Q, 10])
  view Q[b < B, h < 2, q < Q, d < 4]: f32 = xq[b, q, (d + (h * 4))]
  view K[b < B, h < 2, k < K, d < 4]: f32 = xk[b, k, h, d]
  view V[b < B, h < 2, k < K, e < 5]: f32 = xv[b, h, k, e]
  place out[b < B, h < 2, q < Q, e < 5]: f32 -> out[b, q, (e + (h * 5))]
  shared q: f32[4, 4]
  shared k: f32[8, 4]
  shared v: f32[8, 5]
  fragment s: f32[4, 8]
  fragment o: f32[4, 5]
  fragment total: f32[4]
  fragment top: f32[4]
  fragment rescale: f32[4]
  shared values: f32[8, 5]
  fragment unweighted: f32[5]
  fragment worst: f32[1]
  fragment present: f32[1, 4]
  grid m < ((Q + 3) // 4), h < 2, b < B
    annotate reference top = maximum
    copy q = Q[b, h, (m * 4) : +4, 0 : +4]
    fill o = f32(0.0)
    parallel i < 4
      top[i] = f32(-inf)
      total[i] = exp2(((top[i] - select((top[i] == f32(-inf)), f32(0.0), top[i])) * f32(1.4426950216293335)))
    for n in 0 .. ((min(K, ((m * 4) + 4)) + 7) // 8) pipelined stages=2
      copy k = K[b, h, (n * 8) : +8, 0 : +4]
      gemm s = q · kᵀ
      parallel i1 < 4, j < 8
        s[i1, j] = select(((j + (n * 8)) < K), select(((j + (n * 8)) <= (i1 + (m * 4))), (s[i1, j] * f32(0.5)), f32(-inf)), f32(-inf))
      copy rescale = top
      reduce top with= fmax(s, axis=1)
      parallel i2 < 4
        rescale[i2] = exp2(((rescale[i2] - select((top[i2] == f32(-inf)), f32(0.0), top[i2])) * f32(1.4426950216293335)))
        total[i2] = (total[i2] * rescale[i2])
      parallel i3 < 4, j1 < 8
        s[i3, j1] = exp2(((s[i3, j1] - select((top[i3] == f32(-inf)), f32(0.0), top[i3])) * f32(1.4426950216293335)))
      reduce total with= sum(s, axis=1)
      parallel i4 < 4, e < 5
        o[i4, e] = (o[i4, e] * rescale[i4])
      copy v = V[b, h, (n * 8) : +8, 0 : +5]
      gemm o += s · v
    parallel r < 1, i5 < 4
      present[r, i5] = select((i5 < (Q + (m * -4))), total[i5], f32(-inf))
    reduce worst = max(present, axis=1)
    if isnan(worst[0])
      fill unweighted = f32(0.0)
      for n1 in 0 .. ((min(K, ((m * 4) + 4)) + 7) // 8) serial
        copy values = V[b, h, (n1 * 8) : +8, 0 : +5]
        parallel j2 < 8, e1 < 5
          values[j2, e1] = (values[j2, e1] * f32(0.0))
        reduce unweighted with= sum(values, axis=0)
      parallel i6 < 4, e2 < 5
        o[i6, e2] = select(isnan(total[i6]), unweighted[e2], o[i6, e2])
    parallel i7 < 4, e3 < 5
      out[b, h, (i7 + (m * 4)), e3] = select((K == 0), f32(0.0), select((total[i7] > f32(0.0)), (o[i7, e3] / total[i7]), o[i7, e3]))
"""  # noqa: E501 -- one statement a line


def test_attention() -> None:
    form = AttentionForm(mask="causal", guard=True)
    case = attention_case(form, np.random.default_rng(0))
    assert printed(case.spec, block_m=4, block_n=8) == ATTENTION
