// From stored codes to tensor-core operands.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

namespace kv4rl {

// An INT4 value word holds one whole operand (packing.py). Masked to the low byte of each 16-bit half, a code *is* an
// FP16 subnormal: code * 2^-24 in nibble 0, code * 2^-20 in nibble 1. Tensor cores take subnormals exactly, so two
// codes cost one AND and nothing is subtracted. The factors come out once, after the last tile.
constexpr float kLowNibble = 1.0f / (1 << 24);
constexpr float kHighNibble = 1.0f / (1 << 20);

__device__ __forceinline__ void int4_operand(uint32_t word, uint32_t (&a)[4]) {
  uint32_t const late = word >> 8;  // tokens 8 to 15
  a[0] = word & 0x000F000Fu;
  a[1] = word & 0x00F000F0u;
  a[2] = late & 0x000F000Fu;
  a[3] = late & 0x00F000F0u;
}

// Two words of signed bytes, (row g, row g + 8) pairs of tokens 0-7 and of 8-15, to FP16. A byte under 0x64 reads
// 1024 + byte; adding 128 first (the sign flip) makes all bytes positive; subtracting 1152 is exact.
__device__ __forceinline__ void int8_operand(uint32_t early, uint32_t late, uint32_t (&a)[4]) {
  uint32_t const words[2] = {early ^ 0x80808080u, late ^ 0x80808080u};
  __half2 const bias = __half2half2(__ushort_as_half(0x6480));  // 1152
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t const biased = __byte_perm(words[i >> 1], 0x64646464u, i & 1 ? 0x4342 : 0x4140);
    __half2 const exact = __hsub2(*reinterpret_cast<__half2 const*>(&biased), bias);
    a[i] = *reinterpret_cast<uint32_t const*>(&exact);
  }
}

}  // namespace kv4rl
