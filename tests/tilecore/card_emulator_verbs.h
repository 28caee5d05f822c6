// Verbs of tile_sm80.cuh that are machine code there.
static float from_f16(u16 x) { return (float)__builtin_bit_cast(_Float16, x); }
static u16 to_f16(float x) { return __builtin_bit_cast(u16, (_Float16)x); }
static u32 own_thread() { return threadIdx.x; }
static u16 to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7fff : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static u32 pair_bf16(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }
static u32 pair_f16(float low, float high) { return to_f16(low) | (u32)to_f16(high) << 16; }
static void matrices(u32* to, u32 address, bool turned) {
  const Lanes& lanes = show(&address);
  const int lane = threadIdx.x % 32;
  for (int matrix = 0; matrix < 4; matrix++) {
    u16 pair[2];
    for (int e = 0; e < 2; e++) {
      const int row = turned ? 2 * (lane % 4) + e : lane / 4, column = turned ? lane / 4 : 2 * (lane % 4) + e;
      const u32 unit = *(const u32*)lanes.of[8 * matrix + row];
      at_shared(unit, 16);
      pair[e] = shared_load<u16>(unit + 2 * column);
    }
    to[matrix] = pair[0] | (u32)pair[1] << 16;
  }
  __syncwarp();
}
static void load_matrices(u32* to, u32 address) { matrices(to, address, false); }
static void load_turned(u32* to, u32 address) { matrices(to, address, true); }
struct Operands {
  const u32* a;
  u32 b, d;
};
template <float (*Read)(u16)>
static void warp_product(float* c, const u32* a, u32 b, u32 d) {
  const Operands mine = {a, b, d};
  const Lanes& lanes = show(&mine);
  const int lane = threadIdx.x % 32;
  float sums[4];
  auto half = [](u32 word, int e) { return Read((u16)(word >> 16 * e)); };
  for (int x = 0; x < 4; x++) {
    const int row = lane / 4 + x / 2 * 8, column = 2 * (lane % 4) + x % 2;
    double sum = c[x];
    for (int k = 0; k < 16; k++) {
      const Operands& left = *(const Operands*)lanes.of[row % 8 * 4 + k % 8 / 2];
      const Operands& right = *(const Operands*)lanes.of[column * 4 + k % 8 / 2];
      sum += (double)half(left.a[row / 8 + k / 8 * 2], k % 2) * half(k < 8 ? right.b : right.d, k % 2);
    }
    sums[x] = (float)sum;
  }
  __syncwarp();
  memcpy(c, sums, sizeof sums);
}
static float read_bf16(u16 x) { return __int_as_float((u32)x << 16); }
static void warp_product_bf16(float* c, const u32* a, u32 b, u32 d) { warp_product<read_bf16>(c, a, b, d); }
static void warp_product_f16(float* c, const u32* a, u32 b, u32 d) { warp_product<from_f16>(c, a, b, d); }
static float tile_exp2(float x) { return exp2f(x); }
static float tile_inverse(float x) { return 1 / x; }
static float tile_max(float x, float y) { return x != x || y != y ? NAN : fmaxf(x, y); }
static float tile_min(float x, float y) { return x != x || y != y ? NAN : fminf(x, y); }
template <int Words>
static void store_run(void* to, const u32* from, bool once = false) {
  memcpy(to, from, 4 * Words);
}
struct Copy {
  u32 to;
  u16 units[8];
};
static std::vector<std::vector<Copy>> in_flight[1024];  // of a thread, by group; the last one is open
static void copy_unit(u32 to, const u16* from, int elements) {
  Copy copy = {to, {}};
  for (int x = 0; x < elements; x++) copy.units[x] = from[x];
  if (elements && (u64)from % 16) fprintf(stderr, "a copy from an address that 16 does not divide\n"), exit(3);
  memset(at_shared(to, 16), 0xff, 16);  // NaN until it was waited for
  if (in_flight[threadIdx.x].empty()) in_flight[threadIdx.x].emplace_back();
  in_flight[threadIdx.x].back().push_back(copy);
}
static void copies_commit() {
  if (in_flight[threadIdx.x].empty()) in_flight[threadIdx.x].emplace_back();
  in_flight[threadIdx.x].emplace_back();
}
template <int Groups>
static void copies_wait() {
  auto& groups = in_flight[threadIdx.x];
  while ((int)groups.size() - 1 > Groups) {
    for (const Copy& copy : groups.front()) memcpy(at_shared(copy.to, 16), copy.units, 16);
    groups.erase(groups.begin());
  }
}
static void unit_write(u32 to, const u32* words) { memcpy(at_shared(to, 16), words, 16); }
static void unit_read(u32* words, u32 from) { memcpy(words, at_shared(from, 16), 16); }
static void pair_write(u32 to, u32 pair) { memcpy(at_shared(to, 4), &pair, 4); }
static u32 line_word(u32 address) { return shared_load<u32>(address); }
static u16 line_half(u32 address) { return shared_load<u16>(address); }
static void line_pair_f32(float* to, u32 line, int x) { memcpy(to, at_shared(line + 4 * x, 8), 8); }
static void line_write(u32 line, int x, float y) { memcpy(at_shared(line + 4 * x, 4), &y, 4); }
static void fetch_words(u32* to, const void* from, int words, bool once) { memcpy(to, from, 4 * words); }
