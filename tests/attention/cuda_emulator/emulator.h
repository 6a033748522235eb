// Just enough of CUDA to run kernels/cuda on a CPU: one block at a time, its threads as fibers of one OS thread.
// Collectives wait, by yielding, until their whole warp (or block) has come. The headers that hold PTX (mma.cuh,
// bulk_copy.cuh, synchronise.cuh, shared_memory.cuh) are replaced by emulated.h; everything else is the real source.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <unordered_map>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __restrict__
#define threadIdx (emulator::machine().current_index())
#define blockDim (emulator::machine().block_dim)
#define blockIdx (emulator::machine().block_index)
#define gridDim (emulator::machine().grid_dim)

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

namespace emulator {

constexpr int kSharedBytes = 228 << 10;

struct Group {  // threads that meet: a warp, the block, or a named part of it
  std::vector<uint64_t> slots[2];
  int arrived = 0;
  uint64_t generation = 0;
};

struct Barrier {  // an mbarrier
  int expected = 0, pending = 0, bytes = 0;
  unsigned phase = 0;
};

struct Machine {
  Dim block_dim, block_index, grid_dim;
  alignas(128) uint8_t shared[kSharedBytes];
  std::unordered_map<uint32_t, Barrier> barriers;
  std::vector<ucontext_t> fibers;
  std::vector<std::unique_ptr<char[]>> stacks;
  std::vector<bool> done;
  std::vector<Group> warps;
  std::unordered_map<int, Group> groups;
  ucontext_t scheduler;
  int current = 0;
  uint64_t progress = 0;  // meetings and barrier phases completed, to tell waiting from deadlock
  std::function<void()> body;

  Dim current_index() const { return {unsigned(current), 0, 0}; }
  int lane() const { return current % 32; }
  void yield() { swapcontext(&fibers[current], &scheduler); }

  // Every member leaves `value`; all go on once `size` have come. Returns the values, by `place`.
  uint64_t const* meet(Group& group, int size, int place, uint64_t value) {
    uint64_t const generation = group.generation;
    auto& slots = group.slots[generation & 1];
    slots.resize(size);
    slots[place] = value;
    if (++group.arrived == size) {
      group.arrived = 0;
      ++group.generation;
      ++progress;
    } else {
      while (group.generation == generation) yield();
    }
    return slots.data();
  }
  uint64_t const* meet_warp(uint64_t value) { return meet(warps[current / 32], 32, lane(), value); }

  void complete(Barrier& barrier) {
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    barrier.pending = barrier.expected;
    barrier.phase ^= 1;
    ++progress;
  }

  static void enter() {
    Machine& m = instance();
    m.body();
    m.done[m.current] = true;
    ++m.progress;
    m.yield();
  }

  static Machine& instance() {
    static Machine machine;
    return machine;
  }

  void run_block(int threads) {
    constexpr size_t stack_bytes = 256 << 10;
    block_dim = {unsigned(threads), 1, 1};
    barriers.clear(), groups.clear();
    warps.assign((threads + 31) / 32, Group{});
    done.assign(threads, false);
    fibers.resize(threads);
    while (int(stacks.size()) < threads) stacks.emplace_back(new char[stack_bytes]);
    std::memset(shared, 0xFF, sizeof(shared));  // NaN, and far-off indices
    for (int i = 0; i < threads; ++i) {
      getcontext(&fibers[i]);
      fibers[i].uc_stack.ss_sp = stacks[i].get();
      fibers[i].uc_stack.ss_size = stack_bytes;
      fibers[i].uc_link = &scheduler;
      makecontext(&fibers[i], reinterpret_cast<void (*)()>(&Machine::enter), 0);
    }
    for (int left = threads, idle = 0; left > 0;) {
      uint64_t const before = progress;
      for (int i = 0; i < threads; ++i) {
        if (done[i]) continue;
        current = i;
        swapcontext(&scheduler, &fibers[i]);
        if (done[i]) --left;
      }
      idle = progress == before ? idle + 1 : 0;
      if (idle > 1000) std::fprintf(stderr, "deadlock: nobody can go on\n"), std::abort();
    }
  }
};

inline Machine& machine() { return Machine::instance(); }

template <class T>
uint64_t bits(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t b = 0;
  std::memcpy(&b, &value, sizeof(T));
  return b;
}
template <class T>
T from_bits(uint64_t b) {
  T value;
  std::memcpy(&value, &b, sizeof(T));
  return value;
}

// Blocks of a grid, one after the other.
template <class Kernel, class Arguments>
void launch(Kernel kernel, Arguments const& a, Dim grid, int threads) {
  Machine& m = machine();
  m.grid_dim = grid;
  m.body = [&] { kernel(a); };
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) m.block_index = {x, y, 0}, m.run_block(threads);
}

}  // namespace emulator

// ---- warp and block collectives ---------------------------------------------------------------------------------------

template <class T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  auto& m = emulator::machine();
  return emulator::from_bits<T>(m.meet_warp(emulator::bits(value))[m.lane() ^ lanes]);
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  auto& m = emulator::machine();
  return emulator::from_bits<T>(m.meet_warp(emulator::bits(value))[lane & 31]);
}
template <class T, class Fold>
T fold_warp(T value, Fold fold) {
  uint64_t const* all = emulator::machine().meet_warp(emulator::bits(value));
  T result = emulator::from_bits<T>(all[0]);
  for (int i = 1; i < 32; ++i) result = fold(result, emulator::from_bits<T>(all[i]));
  return result;
}
inline int __any_sync(unsigned, int p) { return fold_warp(int(p != 0), [](int a, int b) { return a | b; }); }
template <class T>
T __reduce_add_sync(unsigned, T x) { return fold_warp(x, [](T a, T b) { return T(a + b); }); }
inline void __syncwarp() { emulator::machine().meet_warp(0); }
inline void __syncthreads() {
  auto& m = emulator::machine();
  m.meet(m.groups[0], int(m.block_dim.x), m.current, 0);
}

// ---- arithmetic --------------------------------------------------------------------------------------------------------

template <class T>
T atomicAdd(T* at, T value) { T const old = *at; *at += value; return old; }
inline void __threadfence() {}
template <class T>
T __ldcg(T const* at) { return *at; }
inline int __float_as_int(float x) { return emulator::from_bits<int>(emulator::bits(x)); }
inline unsigned __float_as_uint(float x) { return emulator::from_bits<unsigned>(emulator::bits(x)); }
inline float __int_as_float(int x) { return emulator::from_bits<float>(emulator::bits(x)); }
inline float __uint_as_float(unsigned x) { return emulator::from_bits<float>(emulator::bits(x)); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline int __float2int_rn(float x) {
  return x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x < -2147483648.0f ? -2147483647 - 1 : int(std::nearbyint(x));
}
inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 4; ++i) sum += int8_t(a >> 8 * i) * int8_t(b >> 8 * i);
  return sum;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  uint64_t const bytes = uint64_t(b) << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return out;
}
using std::fabs;
using std::max;
using std::min;

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
