// FP16 by the compiler's _Float16.
#pragma once
#include "emulator.h"

struct __half {
  _Float16 value;
  explicit operator float() const { return float(value); }
};
struct __half2 { __half x, y; };
inline float __half2float(__half h) { return float(h.value); }
inline __half __float2half_rn(float x) { return {_Float16(x)}; }
inline __half __ushort_as_half(unsigned short x) { return emulator::from_bits<__half>(x); }
inline __half2 __half2half2(__half h) { return {h, h}; }
inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
inline __half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return {{_Float16(a.x.value - b.x.value)}, {_Float16(a.y.value - b.y.value)}}; }
inline __half __low2half(__half2 h) { return h.x; }
inline float __low2float(__half2 h) { return __half2float(h.x); }
inline float __high2float(__half2 h) { return __half2float(h.y); }
inline __half __hmin_nan(__half a, __half b) { return a.value != a.value || a.value < b.value ? a : b; }
inline __half __hmax_nan(__half a, __half b) { return a.value != a.value || a.value > b.value ? a : b; }
inline __half2 __hmin2_nan(__half2 a, __half2 b) { return {__hmin_nan(a.x, b.x), __hmin_nan(a.y, b.y)}; }
inline __half2 __hmax2_nan(__half2 a, __half2 b) { return {__hmax_nan(a.x, b.x), __hmax_nan(a.y, b.y)}; }
