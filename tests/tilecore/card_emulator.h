// A card's block of threads on the processor: one fiber per thread, which waits where a card's would. What the kernels'
// header says in machine code stands here in C++; all else of it is used as it is (see card_emulator.py).
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __grid_constant__
using std::max;
using std::min;
struct Index {
  int x;
};
static Index threadIdx, blockIdx, gridDim;
static ucontext_t scheduler, fibers[1024];
static bool finished[1024];
static int threads;
alignas(1024) static unsigned char shared[1 << 18];
static unsigned shared_size;

static void pause_thread() {
  const int self = threadIdx.x;
  swapcontext(&fibers[self], &scheduler);
  threadIdx.x = self;
}
struct Meeting {  // of `size` threads, again and again
  int size = 0, here = 0, times = 0;
  void wait() {
    const int time = times;
    if (++here == size) {
      here = 0, times++;
      return;
    }
    while (times == time) pause_thread();
  }
};
static Meeting block_meeting, warp_meetings[32];
static void __syncthreads() { block_meeting.wait(); }
static void __syncwarp() { warp_meetings[threadIdx.x / 32].wait(); }
struct Lanes {  // what the threads of a warp show each other
  const void* of[32];
};
static Lanes warp_lanes[32];
static const Lanes& show(const void* mine) {
  Lanes& lanes = warp_lanes[threadIdx.x / 32];
  lanes.of[threadIdx.x % 32] = mine;
  __syncwarp();
  return lanes;
}
static float __shfl_xor_sync(unsigned, float x, int mask) {
  const float result = *(const float*)show(&x).of[threadIdx.x % 32 ^ mask];
  __syncwarp();
  return result;
}
static bool __all_sync(unsigned, bool x) {
  const Lanes& lanes = show(&x);
  bool all = true;
  for (const void* one : lanes.of) all = all && *(const bool*)one;
  __syncwarp();
  return all;
}
static float __shfl_up_sync(unsigned, float x, int by) {
  const int lane = threadIdx.x % 32;
  const float result = *(const float*)show(&x).of[lane >= by ? lane - by : lane];
  __syncwarp();
  return result;
}
static float __int_as_float(unsigned x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
static unsigned __float_as_uint(float x) {
  unsigned y;
  memcpy(&y, &x, 4);
  return y;
}
static float __fdividef(float x, float y) { return x / y; }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static unsigned __cvta_generic_to_shared(const void* p) { return (unsigned)((const unsigned char*)p - shared); }
static unsigned char* at_shared(unsigned address, unsigned bytes) {
  if (address + bytes > shared_size || address % bytes) {
    fprintf(stderr, "shared memory: %u bytes at %u of %u\n", bytes, address, shared_size);
    exit(3);
  }
  return shared + address;
}
template <class T>
static T shared_load(unsigned address) {
  T x;
  memcpy(&x, at_shared(address, sizeof x), sizeof x);
  return x;
}
