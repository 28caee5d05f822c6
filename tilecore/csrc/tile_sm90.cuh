// The verbs of kernels for Hopper (sm_90a) beside those of all cards: barriers, tensor copies, warpgroup products.
#pragma once
#include "tile_sm80.cuh"

struct alignas(64) TensorMap {  // the bytes of a CUtensorMap
  u64 words[16];
};

// ---- shared memory and barriers ----
TILE_FN void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
TILE_FN void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
}
TILE_FN void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
TILE_FN void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
TILE_FN void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE_%=;\nbra AGAIN_%=;\nDONE_%=:\n}" ::"r"(barrier), "r"(parity) : "memory");
}
TILE_FN void shared_write(u32 address, u32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
TILE_FN void named_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
TILE_FN void named_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
template <int N>
TILE_FN void registers_raise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
TILE_FN void registers_lower() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- clusters: blocks that share a result ----
TILE_FN void cluster_ready() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
TILE_FN u32 cluster_address(u32 address, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
TILE_FN void cluster_arrive(u32 barrier, u32 rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(barrier, rank))
               : "memory");
}
TILE_FN void cluster_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN_%=: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE_%=;\nbra AGAIN_%=;\nDONE_%=:\n}" ::"r"(barrier), "r"(parity) : "memory");
}
TILE_FN void exchange_write(u32 address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
template <class Kind, int Blocks>
TILE_FN float exchange_read(u32 address) {
  float parts[Blocks];
  TILE_UNROLL for (int rank = 0; rank < Blocks; rank++)
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(parts[rank]) : "r"(cluster_address(address, rank)));
  TILE_UNROLL for (int rank = 1; rank < Blocks; rank++) parts[0] = Kind::join(parts[0], parts[rank]);
  return parts[0];
}

// ---- tasks apart: what each leaves in memory, and who comes last, which goes through all of it ----
TILE_FN void part_write(float* at, float x) { __stcg(at, x); }
TILE_FN float part_read(const float* at) { return __ldcg(at); }
TILE_FN bool all_arrived(u32* counter, int tasks, u32 meeting) {  // of a warpgroup; the counter is 0 again after the last
  named_sync(meeting, 128);
  u32 last = 0;
  if (threadIdx.x % 128 == 0) {  // releases what all threads have written, acquires what the others had
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(last) : "l"(counter), "r"(tasks - 1) : "memory");
    last = last == tasks - 1;
  }
  asm volatile(
      "{\n.reg .pred one, any;\nsetp.ne.u32 one, %0, 0;\nbar.red.or.pred any, %1, 128, one;\nselp.u32 %0, 1, 0, any;\n}"
      : "+r"(last)
      : "r"(meeting)
      : "memory");
  return last != 0;
}
TILE_FN float exchange_own(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
template <class Kind, int Others, int Stride>
TILE_FN float teams_read(float x, u32 address) {
  TILE_UNROLL for (int other = 0; other < Others; other++) x = Kind::join(x, exchange_own(address + other * Stride));
  return x;
}

template <int Set>
TILE_FN bool flags_are(u32 line) {  // whether all of 128 bytes are other than 0, or none is
  const u32 four = line_word(line + threadIdx.x % 32 * 4);
  const u32 set = ((four & 0x7f7f7f7f) + 0x7f7f7f7f | four) & 0x80808080;
  return __all_sync(0xffffffff, set == (Set ? 0x80808080 : 0));
}

// ---- tensor copies: coordinates innermost first ----
TILE_FN void map_fetch(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
#define TILE_LOAD "cp.async.bulk.tensor."
#define TILE_LOAD_TAIL ".shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {"
TILE_FN void load_tile(u32 to, const TensorMap* map, u32 barrier, int a) {
  asm volatile(TILE_LOAD "1d" TILE_LOAD_TAIL "%3}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(a) : "memory");
}
TILE_FN void load_tile(u32 to, const TensorMap* map, u32 barrier, int a, int b) {
  asm volatile(TILE_LOAD "2d" TILE_LOAD_TAIL "%3,%4}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(a), "r"(b)
               : "memory");
}
TILE_FN void load_tile(u32 to, const TensorMap* map, u32 barrier, int a, int b, int c) {
  asm volatile(TILE_LOAD "3d" TILE_LOAD_TAIL "%3,%4,%5}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(a), "r"(b),
               "r"(c)
               : "memory");
}
TILE_FN void load_tile(u32 to, const TensorMap* map, u32 barrier, int a, int b, int c, int d) {
  asm volatile(TILE_LOAD "4d" TILE_LOAD_TAIL "%3,%4,%5,%6}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
TILE_FN void load_tile(u32 to, const TensorMap* map, u32 barrier, int a, int b, int c, int d, int e) {
  asm volatile(TILE_LOAD "5d" TILE_LOAD_TAIL "%3,%4,%5,%6,%7}], [%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(a),
               "r"(b), "r"(c), "r"(d), "r"(e)
               : "memory");
}
#define TILE_STORE_TAIL ".global.shared::cta.tile.bulk_group [%0, {"
TILE_FN void store_tile(const TensorMap* map, u32 from, int a, int b) {
  asm volatile(TILE_LOAD "2d" TILE_STORE_TAIL "%2,%3}], [%1];" ::"l"(map), "r"(from), "r"(a), "r"(b) : "memory");
}
TILE_FN void store_tile(const TensorMap* map, u32 from, int a, int b, int c) {
  asm volatile(TILE_LOAD "3d" TILE_STORE_TAIL "%2,%3,%4}], [%1];" ::"l"(map), "r"(from), "r"(a), "r"(b), "r"(c)
               : "memory");
}
TILE_FN void store_tile(const TensorMap* map, u32 from, int a, int b, int c, int d) {
  asm volatile(TILE_LOAD "4d" TILE_STORE_TAIL "%2,%3,%4,%5}], [%1];" ::"l"(map), "r"(from), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
TILE_FN void store_tile(const TensorMap* map, u32 from, int a, int b, int c, int d, int e) {
  asm volatile(TILE_LOAD "5d" TILE_STORE_TAIL "%2,%3,%4,%5,%6}], [%1];" ::"l"(map), "r"(from), "r"(a), "r"(b), "r"(c),
               "r"(d), "r"(e)
               : "memory");
}
TILE_FN void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
TILE_FN void stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }  // staging is free again
TILE_FN void stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
TILE_FN void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- warpgroup products (wgmma itself is stamped out per shape and type by the generator) ----
TILE_FN void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TILE_FN void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
TILE_FN void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Operands lie in chunks of 64 elements (128 bytes, 128-byte swizzle) along their contiguous axis.
TILE_FN u64 depth_major(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}
TILE_FN u64 depth_minor(u32 address, u32 chunk_bytes) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(chunk_bytes >> 4) << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}

TILE_FN void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
TILE_FN void store_turned(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
// ---- packed levels: the first of two in the low bits ----
TILE_FN u32 opaque(u32 x) {  // nothing is known of it, so that sums of it and constants stay sums, which addresses take
  asm volatile("" : "+r"(x));
  return x;
}
TILE_FN u32 shared_u8(u32 address) {
  u32 x;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
TILE_FN u32 shared_u16(u32 address) {
  u32 x;
  asm volatile("{\n.reg .u16 y;\nld.shared.u16 y, [%1];\ncvt.u32.u16 %0, y;\n}" : "=r"(x) : "r"(address) : "memory");
  return x;
}
template <int Words>
TILE_FN void shared_words(u32* to, u32 address) {
  if constexpr (Words == 2)
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(address) : "memory");
  else
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}
// As whole numbers: in halves whose low bits they become (`Ones` has the others, and which bits to flip), and in floats
// from 2^23 on. Of a byte, of two bytes, or pair `x` of a word, whose nibbles 4 apart are one.
template <u32 Ones>
TILE_FN u32 levels_4(u32 x, u32 mask) {
  return (x * 0x1001 & mask) ^ Ones;
}
template <u32 Ones>
TILE_FN u32 level_pair_4(u32 word, int x, u32 mask) {
  return ((word >> 4 * x) & mask) ^ Ones;
}
template <u32 Ones>
TILE_FN u32 level_pair_8(u32 word, int x, u32) {
  const u32 order = x ? 0x4342 : 0x4140;
  return (Ones & 0xff) == 0 ? __byte_perm(word, Ones >> 8, order) : __byte_perm(word, 0, order) ^ Ones;
}
template <u32 Ones>
TILE_FN u32 levels_8(u32 x, u32) {
  return level_pair_8<Ones>(x, 0, 0);
}
template <int Bits, u32 Flip>
TILE_FN float level_f32(u32 x, int from) {
  if constexpr (Bits == 8) return __int_as_float(__byte_perm(x, 0x4b000000, 0x7440 | from / 8) ^ Flip);
  return __int_as_float(((x >> from) & ((1u << Bits) - 1)) ^ (0x4b000000u | Flip));
}
// 16 elements of a column of the right operand, in the pairs in which a word's levels come.
template <int Bits>
TILE_FN void column_words(u32 (&to)[8], u32 address) {
  u32 x[8];
  shared_words<4>(x, address);
  shared_words<4>(x + 4, address ^ 16);
  TILE_UNROLL for (int y = 0; y < 8; y++)
    to[y] = Bits == 8 ? x[y] : __byte_perm(x[y / 4 * 4 + y % 4 / 2], x[y / 4 * 4 + y % 4 / 2 + 2], y % 2 ? 0x7632 : 0x5410);
}
TILE_FN u32 subtract_bf16(u32 x, u32 y) {
  u32 z;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
TILE_FN u32 subtract_f16(u32 x, u32 y) {
  u32 z;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
TILE_FN u32 multiply_bf16(u32 x, u32 y) {
  u32 z;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
TILE_FN u32 multiply_f16(u32 x, u32 y) {
  u32 z;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// Row values of warpgroups that share rows, each having reduced its own columns; `at` is room for all their rows.
// Two such places taken in turn: who writes one has met the others since they read it.
template <class Kind, int Groups>
TILE_FN void join_groups(float (&result)[2], u32 at, u32 meeting) {
  const u32 row = at + (threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) * 4;
  if (threadIdx.x % 4 == 0)
    TILE_UNROLL for (int h = 0; h < 2; h++) {
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(row + threadIdx.x / 128 * 256 + 32 * h), "f"(result[h]) : "memory");
    }
  named_sync(meeting, Groups * 128);
  TILE_UNROLL for (int h = 0; h < 2; h++) {
    float parts[Groups];
    TILE_UNROLL for (int group = 0; group < Groups; group++)
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(parts[group]) : "r"(row + group * 256 + 32 * h) : "memory");
    result[h] = parts[0];
    TILE_UNROLL for (int group = 1; group < Groups; group++) result[h] = Kind::join(result[h], parts[group]);
  }
}

// ---- references that maxima are left out for ----
// Rows that had no number yet, or none that is not a mask's, need their maximum, and those whose sums grow large.
template <int H>
TILE_FN bool must_rise(const float (&top)[H], const float (&total)[H], float large) {
  bool found = false;
  TILE_UNROLL for (int h = 0; h < H; h++) found |= !(top[h] > -1000.0f) || !(total[h] < large);
  return __any_sync(0xffffffff, found);
}
template <int N>
TILE_FN void mark_unless_finite(u32 marks, int number, const float (&sums)[N]) {
  float zeros = 0.0f;
  TILE_UNROLL for (int x = 0; x < N; x++) zeros = fmaf(sums[x], 0.0f, zeros);
  if (zeros != 0.0f) asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(marks), "r"(1u << (number & 31)) : "memory");
}

// ---- the order of tiles whose work grows or falls with their row ----
// As many heads as fill all blocks evenly go in pairs, the others longest first: those are read by all blocks at the same
// time, which needs keys that stay in the L2 cache, or that eight blocks share. Elsewhere all heads go in pairs.
TILE_FN int paired_heads(int blocks, int rows, int heads) {
  if (heads * ((rows + 1) / 2) < blocks) return 0;
  int a = blocks, b = (rows + 1) / 2;
  while (b != 0) {
    const int rest = a % b;
    a = b, b = rest;
  }
  const int left = heads % (blocks / a);
  return left * 8 <= blocks || left * rows <= 512 ? heads - left : heads;
}
TILE_FN int mixed_tile(int turn, int block, int blocks, int rows, int heads, int paired, int& row, int& head) {
  const int turns = (paired * ((rows + 1) / 2) + blocks - 1) / blocks * 2;
  if (turn < turns) return balanced_tile(turn, block, blocks, rows, paired, row, head) == 1 ? 1 : 2;
  const int own = turn - turns, others = heads - paired, t = own * blocks + (own % 2 ? blocks - 1 - block : block);
  if (own * blocks >= rows * others) return 0;
  row = rows - 1 - t / others;
  head = paired + t % others;
  return t >= rows * others ? 2 : 1;
}
