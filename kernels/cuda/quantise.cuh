// A vector to codes. Formulas, rounding and order of operations are kv4rl/formats', so that the stored bits are the
// reference's; divisions and roundings are done without the slow instructions for them.
#pragma once
#include "arithmetic.cuh"
#include "vector.cuh"

namespace kv4rl {

constexpr unsigned short kFp16Max = 0x7BFF, kFp16Least = 0xFBFF;  // 65504 and -65504
constexpr float kLeastStep = 1.17549435e-38f;  // the smallest normal float: a query whose step is below it is zero
constexpr float kExtreme = 1e38f;              // what is beyond saturates anyway (formats/affine.py)
constexpr float kRounder = 12582912.0f;        // 1.5 * 2^23: |x| < 2^22 added to it is rounded half to even in the low bits

// Each code in the low byte, in two's complement; the other bits are not its own.
struct Codes {
  uint32_t c[kEach];

  // Those of channels 4i ... 4i + 3.
  __device__ __forceinline__ uint32_t word(int i) const {
    uint32_t const low = __byte_perm(c[4 * i], c[4 * i + 1], 0x0040);
    return __byte_perm(low, __byte_perm(c[4 * i + 2], c[4 * i + 3], 0x0040), 0x5410);
  }
};

// To FP16's finite range; NaN stays NaN.
__device__ __forceinline__ __half saturate(float magnitude) {
  return __hmin_nan(__float2half_rn(magnitude), __ushort_as_half(kFp16Max));
}

__device__ __forceinline__ __half2 saturate(float x, float y) {
  __half2 const top = __half2half2(__ushort_as_half(kFp16Max)), bottom = __half2half2(__ushort_as_half(kFp16Least));
  return __hmax2_nan(__hmin2_nan(__floats2half2_rn(x, y), top), bottom);
}

// x / kDivisor as IEEE division rounds it, for any x but an infinite one: Markstein's correction of the product with the
// rounded reciprocal.
template <int kDivisor>
__device__ __forceinline__ float divided_by(float x) {
  constexpr float inverse = 1.0f / kDivisor;
  float const near = x * inverse;
  return fmaf(fmaf(-near, float(kDivisor), x), inverse, near);
}

// The same for one step and many x, none of them infinite. The step is a normal float.
struct Divider {
  float step, inverse;

  __device__ __forceinline__ explicit Divider(float step) : step(step) {
    float const near = reciprocal_approx(step);
    inverse = fmaf(fmaf(-step, near, 1.0f), near, near);
  }
  __device__ __forceinline__ float operator()(float x) const {
    float const near = x * inverse;
    return fmaf(fmaf(-near, step, x), inverse, near);
  }
};

// Codes of (x - from) / step within [low, high]; 0 where the step is zero, infinite or NaN. With kInside (the step is not
// FP16) they are within anyway.
template <bool kInside>
__device__ __forceinline__ Codes encode(Vector const& y, float from, float step, float low, float high) {
  Codes codes = {};
  if (step >= kLeastStep && (!kInside || step < INFINITY)) {
    Divider const by(step);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      float const quotient = by(y.x[i] - from);
      codes.c[i] = __float_as_uint((kInside ? quotient : fminf(fmaxf(quotient, low), high)) + kRounder);
    }
  }
  return codes;
}

template <bool kInside>
__device__ __forceinline__ Codes symmetric(Vector const& y, float step) {
  return encode<kInside>(y, 0.0f, step, -127.0f, 127.0f);
}

// The largest magnitude of the vector; NaN if it holds one.
__device__ __forceinline__ float largest(Vector const& y) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) amax = max_or_nan(amax, fabsf(y.x[i]));
  return over_team(amax, max_or_nan);
}

// Smallest and largest element; both NaN if the vector holds one.
struct Range {
  float low, high;

  __device__ __forceinline__ float magnitude() const { return max_or_nan(fabsf(low), fabsf(high)); }
};

__device__ __forceinline__ Range range_of(Vector const& y) {
  Range range = {y.x[0], y.x[0]};
#pragma unroll
  for (int i = 1; i < kEach; ++i)
    range = {min_or_nan(range.low, y.x[i]), max_or_nan(range.high, y.x[i])};
  return {over_team(range.low, min_or_nan), over_team(range.high, max_or_nan)};
}

__device__ __forceinline__ float within_extremes(float x) { return fminf(fmaxf(x, -kExtreme), kExtreme); }

// Infinite and nearly infinite elements to +-kExtreme: their codes are the same, and a difference or quotient is finite.
__device__ __forceinline__ void bring_within_extremes(Vector& y) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) y.x[i] = within_extremes(y.x[i]);
}

// Eq. 3.3's scale and offset in `metadata`, and the codes that go with them; all is within extremes.
__device__ __forceinline__ Codes affine(Vector const& y, Range const& range, __half2& metadata) {
  metadata = saturate(divided_by<15>(range.high - range.low), range.low);
  return encode<false>(y, __high2float(metadata), __low2float(metadata), 0.0f, 15.0f);
}

}  // namespace kv4rl
