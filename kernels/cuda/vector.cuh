// One head's vector of one token, in the registers of a team of lanes, EACH consecutive channels a lane: loading it,
// QK-norm and RoPE where they are still to be done, and its rotation (Eq. 3.4). A build fixes HEAD_DIM, EACH and
// INPUT_TYPE.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "layout.cuh"
#include "shared_memory.cuh"

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
  Elements mine;
#pragma unroll
  for (int i = 0; i < int(sizeof(Elements)); i += 16) {
    uint4 const w = load_in_order_16(static_cast<uint8_t const*>(vector) + lane * sizeof(Elements) + i);
    mine.word[i / 4] = w.x, mine.word[i / 4 + 1] = w.y, mine.word[i / 4 + 2] = w.z, mine.word[i / 4 + 3] = w.w;
  }
  return mine;
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

// Rounded to the model's type.
__device__ __forceinline__ Elements pack(Vector const& y) {
  Elements to;
#pragma unroll
  for (int i = 0; i < kEach * kElementBytes / 4; ++i) {
    if constexpr (INPUT_TYPE == kFp32) {
      to.word[i] = __float_as_uint(y.x[i]);
    } else if constexpr (INPUT_TYPE == kBf16) {
      __nv_bfloat162 const pair = __floats2bfloat162_rn(y.x[2 * i], y.x[2 * i + 1]);
      to.word[i] = *reinterpret_cast<uint32_t const*>(&pair);
    } else {
      __half2 const pair = __floats2half2_rn(y.x[2 * i], y.x[2 * i + 1]);
      to.word[i] = *reinterpret_cast<uint32_t const*>(&pair);
    }
  }
  return to;
}

template <class T, class Combine>
__device__ __forceinline__ T over_team(T x, Combine combine) {
#pragma unroll
  for (int lanes = 1; lanes < kTeam; lanes *= 2) x = combine(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}

// x / rms(x) * weight. The sum has one order for any kEach: runs of 8 channels, then neighbouring runs.
__device__ __forceinline__ void normalise(Vector& y, Elements const& weight, float eps) {
  float sum = 0.0f;
#pragma unroll
  for (int run = 0; run < kEach; run += 8) {
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) part = fmaf(y.x[run + i], y.x[run + i], part);
    sum += part;
  }
  sum = over_team(sum, [](float a, float b) { return a + b; });
  float const inverse = rsqrtf(sum * (1.0f / kD) + eps);
  Vector const w = unpack(weight);
#pragma unroll
  for (int i = 0; i < kEach; ++i) y.x[i] = y.x[i] * inverse * w.x[i];
}

// RoPE: channel i turns with channel i + D / 2; sines are negative in the first half.
__device__ __forceinline__ void turn(Vector& y, Elements const& cosines, Elements const& sines) {
  Vector const c = unpack(cosines), s = unpack(sines);
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    y.x[i] = fmaf(__shfl_xor_sync(~0u, y.x[i], kTeam / 2), s.x[i], y.x[i] * c.x[i]);
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
