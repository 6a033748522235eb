// One head's vector of one token, in the registers of a team of lanes, EACH consecutive channels a lane: loading it,
// summing over it, rotating it (Eq. 3.4). A build fixes HEAD_DIM, EACH and INPUT_TYPE.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "layout.cuh"

namespace kv4rl {

enum InputType { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

constexpr int kD = HEAD_DIM;
constexpr int kEach = EACH;         // 8 or 16
constexpr int kTeam = kD / kEach;   // lanes of one vector
constexpr int kTeams = kWarp / kTeam;  // vectors of a warp
constexpr int kElementBytes = INPUT_TYPE == kFp32 ? 4 : 2;

struct Vector {
  float x[kEach];
};

// A lane's channels as they lie in memory.
struct alignas(16) Elements {
  uint32_t word[kEach * kElementBytes / 4];
};

__device__ __forceinline__ Elements load_elements(void const* vector, unsigned lane) {
  return static_cast<Elements const*>(vector)[lane];
}

__device__ __forceinline__ Vector unpack(Elements const& from) {
  Vector y;
#pragma unroll
  for (int i = 0; i < kEach * kElementBytes / 4; ++i) {
    uint32_t const word = from.word[i];
    if constexpr (INPUT_TYPE == kFp32) {
      y.x[i] = __uint_as_float(word);
    } else if constexpr (INPUT_TYPE == kBf16) {
      y.x[2 * i] = __uint_as_float(word << 16), y.x[2 * i + 1] = __uint_as_float(word & 0xFFFF0000u);
    } else {
      y.x[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(word)));
      y.x[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
    }
  }
  return y;
}

template <class T, class Combine>
__device__ __forceinline__ T over_team(T x, Combine combine) {
#pragma unroll
  for (int lanes = 1; lanes < kTeam; lanes *= 2) x = combine(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}

// x H, largest stride first, as formats/hadamard.py: across lanes, then inside one.
__device__ __forceinline__ void rotate(Vector& y, unsigned lane) {
#pragma unroll
  for (int lanes = kTeam / 2; lanes > 0; lanes /= 2) {
    float const sign = lane & lanes ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) y.x[i] = fmaf(sign, y.x[i], __shfl_xor_sync(~0u, y.x[i], lanes));
  }
#pragma unroll
  for (int half = kEach / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if ((i & half) == 0) {
        float const upper = y.x[i], lower = y.x[i + half];
        y.x[i] = upper + lower;
        y.x[i + half] = upper - lower;
      }
  constexpr float norm = kD == 64 ? 0.125f : kD == 128 ? 0.08838834764831845f : 0.0625f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) y.x[i] *= norm;
}

}  // namespace kv4rl
