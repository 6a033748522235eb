// BF16 as the upper half of an FP32, rounded half to even.
#pragma once
#include "emulator.h"

struct __nv_bfloat16 {
  unsigned short bits;
  explicit operator float() const { return __uint_as_float(unsigned(bits) << 16); }
};
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  unsigned const b = __float_as_uint(x);
  return {static_cast<unsigned short>(x != x ? 0x7FFF : (b + 0x7FFF + (b >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__float2bfloat16_rn(a), __float2bfloat16_rn(b)}; }
