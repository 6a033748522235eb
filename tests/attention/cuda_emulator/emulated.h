// Stands in for the headers that hold PTX; same functions, by their definition in the PTX manual.
#pragma once
#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace kv4rl {

inline uint8_t (&dynamic)[emulator::kSharedBytes] = emulator::machine().shared;

// ---- shared_memory.cuh -------------------------------------------------------------------------------------------------

inline uint32_t shared_address(void const* pointer) {
  return uint32_t(static_cast<uint8_t const*>(pointer) - emulator::machine().shared);
}
template <class T>
T load_shared(uint32_t address) {
  if (address % sizeof(T) != 0 || address + sizeof(T) > emulator::kSharedBytes)
    std::fprintf(stderr, "bad shared address %u\n", address), std::abort();
  T value;
  std::memcpy(&value, emulator::machine().shared + address, sizeof(T));
  return value;
}
inline uint4 load_shared_16(uint32_t address) { return load_shared<uint4>(address); }
inline uint2 load_shared_8(uint32_t address) { return load_shared<uint2>(address); }
inline uint32_t load_shared_4(uint32_t address) { return load_shared<uint32_t>(address); }
inline uint4 load_in_order_16(void const* global) { return *static_cast<uint4 const*>(global); }
inline int64_t load_in_order_8(void const* global) { return *static_cast<int64_t const*>(global); }
inline uint16_t load_in_order_2(void const* global) { return *static_cast<uint16_t const*>(global); }
inline int load_in_order_4(void const* global) { return *static_cast<int const*>(global); }
inline int lane_index() { return emulator::machine().lane(); }

// ---- synchronise.cuh, bulk_copy.cuh ------------------------------------------------------------------------------------

inline void barrier_init(uint32_t barrier, int arrivals) {
  emulator::machine().barriers[barrier] = {arrivals, arrivals, 0, 0};
}
inline void barrier_arrive(uint32_t barrier) {
  auto& b = emulator::machine().barriers.at(barrier);
  --b.pending;
  emulator::machine().complete(b);
}
inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  emulator::machine().barriers.at(barrier).bytes += int(bytes);
  barrier_arrive(barrier);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  auto& m = emulator::machine();
  while (m.barriers.at(barrier).phase == parity) m.yield();
}
inline bool barrier_over(uint32_t barrier, uint32_t parity) {
  return emulator::machine().barriers.at(barrier).phase != parity;
}
inline bool barrier_over(uint32_t barrier, uint32_t parity, uint32_t) {
  if (!barrier_over(barrier, parity)) emulator::machine().yield();
  return barrier_over(barrier, parity);
}
inline void take(int* counter, bool takes, int& ticket) {
  if (takes) ticket = (*counter)++;
}
inline void barriers_ready() {}
inline void await_previous_launch() {}
inline void let_next_launch_begin() {}
template <int kThreads>
void named_barrier() {
  auto& m = emulator::machine();
  m.meet(m.groups[kThreads], kThreads, m.current, 0);
}
inline int arrive(int* counter) { return (*counter)++; }
inline uint64_t evict_first_policy() { return 0; }
inline void bulk_copy(uint32_t shared, void const* global, uint32_t bytes, uint32_t barrier, uint64_t) {
  if (shared % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0)
    std::fprintf(stderr, "bulk copy not aligned\n"), std::abort();
  auto& m = emulator::machine();
  for (int i = 0; i < int(bytes % 3); ++i) m.yield();
  std::memcpy(m.shared + shared, global, bytes);
  auto& b = m.barriers.at(barrier);
  b.bytes -= int(bytes);
  m.complete(b);
}

// ---- mma.cuh -----------------------------------------------------------------------------------------------------------

// D = A B + C of one warp: A [16, K] and B [K, 8] element by element from the lanes' registers, C as PTX lays it out.
template <int K, class A, class B, class Sum>
void emulate_mma(Sum (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2], A element_a, B element_b) {
  auto& m = emulator::machine();
  constexpr int each = K / 8;  // elements of a register
  uint32_t all_a[4][32], all_b[2][32];
  for (int i = 0; i < 4; ++i) {
    uint64_t const* got = m.meet_warp(a[i]);
    for (int lane = 0; lane < 32; ++lane) all_a[i][lane] = uint32_t(got[lane]);
  }
  for (int i = 0; i < 2; ++i) {
    uint64_t const* got = m.meet_warp(b[i]);
    for (int lane = 0; lane < 32; ++lane) all_b[i][lane] = uint32_t(got[lane]);
  }
  int const g = m.lane() / 4, t = m.lane() % 4;
  for (int i = 0; i < 4; ++i) {
    int const row = g + i / 2 * 8, column = 2 * t + i % 2;
    double sum = double(c[i]);
    for (int k = 0; k < K; ++k) {
      int const half = k / (K / 2), owner = k % (K / 2) / each, place = k % each;
      double const left = element_a(all_a[2 * half + row / 8][4 * (row % 8) + owner], place);
      sum += left * element_b(all_b[half][4 * column + owner], place);
    }
    c[i] = Sum(sum);
  }
}

inline double u8_of(uint32_t w, int i) { return uint8_t(w >> 8 * i); }
inline double s8_of(uint32_t w, int i) { return int8_t(w >> 8 * i); }
inline double f16_of(uint32_t w, int i) { return __half2float(__ushort_as_half(uint16_t(w >> 16 * i))); }
inline double bf16_of(uint32_t w, int i) { return __uint_as_float(w >> 16 * i << 16); }

inline void mma_u8s8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  emulate_mma<32>(c, {a0, a1, a2, a3}, {b0, b1}, u8_of, s8_of);
}
inline void mma_u8u8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  emulate_mma<32>(c, {a0, a1, a2, a3}, {b0, b1}, u8_of, u8_of);
}
inline void mma_s8s8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  emulate_mma<32>(c, {a0, a1, a2, a3}, {b0, b1}, s8_of, s8_of);
}
inline void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  emulate_mma<16>(c, {a0, a1, a2, a3}, {b0, b1}, f16_of, f16_of);
}
template <bool kBf16>
void mma_16bit(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  if (kBf16)
    emulate_mma<16>(c, {a0, a1, a2, a3}, {b0, b1}, bf16_of, bf16_of);
  else
    mma_f16(c, a0, a1, a2, a3, b0, b1);
}

inline uint32_t transpose8x8(uint32_t x) {
  auto& m = emulator::machine();
  uint64_t const* all = m.meet_warp(x);
  int const row = m.lane() / 4, t = m.lane() % 4;
  auto element = [&](int r, int c) { return uint32_t(all[4 * r + c / 2]) >> 16 * (c % 2) & 0xFFFF; };
  return element(2 * t, row) | element(2 * t + 1, row) << 16;
}
template <bool kBf16>
uint32_t pack_16bit(float low, float high) {
  if (kBf16) return uint32_t(emulator::bits(__floats2bfloat162_rn(low, high)));
  return uint32_t(emulator::bits(__floats2half2_rn(low, high)));
}

// ---- arithmetic.cuh ----------------------------------------------------------------------------------------------------

inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline float max_or_nan(float a, float b) { return a != a || b != b ? NAN : std::max(a, b); }
inline float min_or_nan(float a, float b) { return a != a || b != b ? NAN : std::min(a, b); }

}  // namespace kv4rl
