// The running softmax of one warp over its tiles, and its share of the output.
#pragma once
#include <cmath>
#include <cstdint>

#include "arithmetic.cuh"
#include "mma.cuh"

namespace kv4rl {

// Of a tile's tokens g and g + 8.
struct Metadata {
  float k_scale[2], k_offset[2], v_scale[2], v_offset[2];
};

constexpr float kLn2 = 0.6931471805599453f;
// When a score passes the running maximum, the maximum moves this far above it (log2 units), so that it moves rarely.
constexpr float kMargin = 4.0f;
// P's FP16 operand is p * v_scale * (kOperandTop / largest power of two above all scales so far): at most kOperandTop,
// and normal down to 2^-28 of it, whatever the size of the values.
constexpr float kOperandTop = 16384.0f;
constexpr float kSmallestScale = 1.0f / (1 << 24);  // the smallest positive FP16

__device__ __forceinline__ float max_over_tokens(float x) {
#pragma unroll
  for (int lanes = 4; lanes < kWarp; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}

__device__ __forceinline__ float sum_over_tokens(float x) {
#pragma unroll
  for (int lanes = 4; lanes < kWarp; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

// kOperandTop / (the power of two above scale), by exponent arithmetic; scale is not negative.
__device__ __forceinline__ float inverse_reference(float scale) {
  uint32_t const above = (__float_as_uint(fmaxf(scale, kSmallestScale)) >> 23) + 1;  // exponent field, bias 127
  return __uint_as_float((127 + 14 + 127 - above) << 23);
}

// Lane 4g + t: of a tile's scores, s[n][0, 1] belong to token g and heads 8n + 2t, 8n + 2t + 1; s[n][2, 3] to token
// g + 8. Of the output tile j, o[n][j][0, 1] are channel row g, o[n][j][2, 3] row g + 8, same heads.
template <int D, int N>
struct OnlineSoftmax {
  float top[N][2];       // log2 domain; at least every score so far; equal in the lanes of one t
  float total[N][2];     // this lane's part of sum p
  float offset[N][2];    // this lane's part of sum p * v_offset
  float inverse;         // kOperandTop / reference scale
  float o[N][D / 16][4];  // sum of operand * code

  __device__ __forceinline__ void reset() {
    inverse = kOperandTop / kSmallestScale;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      top[n][0] = top[n][1] = -INFINITY;
      total[n][0] = total[n][1] = offset[n][0] = offset[n][1] = 0.0f;
#pragma unroll
      for (int j = 0; j < D / 16; ++j) o[n][j][0] = o[n][j][1] = o[n][j][2] = o[n][j][3] = 0.0f;
    }
  }

  // Take the scores (log2 domain, -inf where masked) and value metadata of T tiles; give P's FP16 (or BF16) operands.
  template <bool kOffset, bool kBf16, int T>
  __device__ __forceinline__ void absorb(float const (&s)[T][N][4], Metadata const (&m)[T],
                                         uint32_t (&operand)[T][N][2]) {
    float p[T][N][4];
    probabilities<kOffset, true>(s, m, p);
#pragma unroll
    for (int i = 0; i < T; ++i) {
      float const early = m[i].v_scale[0] * inverse, late = m[i].v_scale[1] * inverse;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        operand[i][n][0] = transpose8x8(pack_16bit<kBf16>(p[i][n][0] * early, p[i][n][1] * early));
        operand[i][n][1] = transpose8x8(pack_16bit<kBf16>(p[i][n][2] * late, p[i][n][3] * late));
      }
    }
  }

  // The paper's 8-bit operands (A.3): p * v_scale = unit * byte, the unit of a head the largest of the T tiles / 255.
  // A register holds tokens 2t, 2t + 8, 2t + 1, 2t + 9 of one tile.
  template <bool kOffset, int T>
  __device__ __forceinline__ void absorb_bytes(float const (&s)[T][N][4], Metadata const (&m)[T],
                                               uint32_t (&operand)[T][N], float (&unit)[N][2]) {
    float p[T][N][4];
    probabilities<kOffset, false>(s, m, p);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float steps[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < T; ++i) {
          p[i][n][h] *= m[i].v_scale[0], p[i][n][h + 2] *= m[i].v_scale[1];
          most = fmaxf(most, fmaxf(p[i][n][h], p[i][n][h + 2]));
        }
        most = max_over_tokens(most);
        steps[h] = most > 0.0f ? 255.0f / most : 0.0f;
        unit[n][h] = most * (1.0f / 255.0f);
      }
#pragma unroll
      for (int i = 0; i < T; ++i) {
        uint32_t bytes[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) bytes[k] = __float2int_rn(p[i][n][k] * steps[k & 1]);
        operand[i][n] = transpose8x8(bytes[0] | bytes[1] << 16) | transpose8x8(bytes[2] | bytes[3] << 16) << 8;
      }
    }
  }

  // p of T tiles, with the maxima, the sums and (kReference) the reference scale brought up to them.
  template <bool kOffset, bool kReference, int T>
  __device__ __forceinline__ void probabilities(float const (&s)[T][N][4], Metadata const (&m)[T],
                                                float (&p)[T][N][4]) {
    float most = m[0].v_scale[0];
    float seen[N][2];
#pragma unroll
    for (int i = 1; i < 2 * T; ++i) most = fmaxf(most, m[i / 2].v_scale[i % 2]);
    bool risen = kReference && most * inverse > kOperandTop;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        seen[n][h] = fmaxf(s[0][n][h], s[0][n][h + 2]);
#pragma unroll
        for (int i = 1; i < T; ++i) seen[n][h] = fmaxf(seen[n][h], fmaxf(s[i][n][h], s[i][n][h + 2]));
        risen = risen || seen[n][h] > top[n][h];
      }
    if (__any_sync(~0u, risen)) raise<kReference>(seen, most);
#pragma unroll
    for (int i = 0; i < T; ++i)
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int k = 0; k < 4; ++k) p[i][n][k] = exp2_approx(s[i][n][k] - top[n][k & 1]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          total[n][h] += p[i][n][h] + p[i][n][h + 2];
          if constexpr (kOffset)
            offset[n][h] = fmaf(p[i][n][h], m[i].v_offset[0], fmaf(p[i][n][h + 2], m[i].v_offset[1], offset[n][h]));
        }
      }
  }

  // Move the maxima and the reference scale up to these tiles', and bring what was summed to the new ones. Rare.
  template <bool kReference>
  __device__ __forceinline__ void raise(float const (&lane_max)[N][2], float v_scale) {
    float rescale = 1.0f;
    if constexpr (kReference) {
      float const lowered = fminf(inverse, inverse_reference(max_over_tokens(v_scale)));
      rescale = lowered / inverse;  // both powers of two
      inverse = lowered;
    }
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float const seen = max_over_tokens(lane_max[n][h]);
        float const raised = seen > top[n][h] ? seen + kMargin : top[n][h];
        float const factor = raised == top[n][h] ? 1.0f : exp2_approx(top[n][h] - raised);
        top[n][h] = raised;
        total[n][h] *= factor;
        offset[n][h] *= factor;
#pragma unroll
        for (int j = 0; j < D / 16; ++j) {
          o[n][j][h] *= factor * rescale;
          o[n][j][h + 2] *= factor * rescale;
        }
      }
  }

  // Bring the output from the unit of FP16 operands to that of codes themselves, times low_rows and high_rows.
  __device__ __forceinline__ void leave_reference(float low_rows, float high_rows) {
    scale_output(low_rows / inverse, high_rows / inverse);
    inverse = 1.0f;
  }

  __device__ __forceinline__ void scale_output(float low_rows, float high_rows) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < D / 16; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[n][j][i] *= i < 2 ? low_rows : high_rows;
  }
};

}  // namespace kv4rl
