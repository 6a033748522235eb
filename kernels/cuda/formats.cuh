// The tile formats: how 16 tokens of one KV head give scores and take probabilities.
// raw_scores: integer sums of code * query code, c[n][0, 1] for token g and heads 8n + 2t, + 1; c[n][2, 3] for g + 8.
// accumulate: o += operand * value code, in the format's own unit (OnlineSoftmax::scale_output takes it out).
#pragma once
#include "dequantise.cuh"
#include "layout.cuh"
#include "mma.cuh"

namespace kv4rl {

// The lane's query operand: of head 8n + g, channels 64s + 16t to + 15, in the order of the stored keys.
template <int D, int N>
struct QueryCodes {
  uint4 words[N][D / 64];
};

// Of tokens g and g + 8.
struct Metadata {
  float k_scale[2], k_offset[2], v_scale[2], v_offset[2];
};

template <int D>
struct Int4Format {
  using Chunk = Int4Chunk<D>;
  static constexpr bool has_offset = true;
  static constexpr float score_unit = 1.0f / 16;  // high nibbles are multiplied where they stand
  static constexpr float low_rows = kLowNibble, high_rows = kHighNibble;

  static __device__ __forceinline__ Metadata metadata(uint8_t const* chunk, int lane) {
    Metadata m;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint2 const w = reinterpret_cast<uint2 const*>(chunk + Chunk::metadata)[lane / 4 + 8 * i];
      float2 const k = __half22float2(*reinterpret_cast<__half2 const*>(&w.x));
      float2 const v = __half22float2(*reinterpret_cast<__half2 const*>(&w.y));
      m.k_scale[i] = k.x, m.k_offset[i] = k.y, m.v_scale[i] = v.x, m.v_offset[i] = v.y;
    }
    return m;
  }

  template <int N>
  static __device__ __forceinline__ void raw_scores(uint8_t const* chunk, int lane, QueryCodes<D, N> const& q,
                                                    int (&c)[N][4]) {
    constexpr uint32_t low = 0x0F0F0F0Fu, high = 0xF0F0F0F0u;
    int c_low[N][4] = {}, c_high[N][4] = {};
#pragma unroll
    for (int s = 0; s < D / 64; ++s) {
      uint4 const k = reinterpret_cast<uint4 const*>(chunk)[s * kWarp + lane];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint4 const& b = q.words[n][s];
        mma_u8s8(c_low[n], k.x & low, k.y & low, k.z & low, k.w & low, b.x, b.y);
        mma_u8s8(c_high[n], k.x & high, k.y & high, k.z & high, k.w & high, b.z, b.w);
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) c[n][i] = 16 * c_low[n][i] + c_high[n][i];  // below 2^24: exact in FP32
  }

  template <int N>
  static __device__ __forceinline__ void accumulate(uint8_t const* chunk, int lane, uint32_t const (&operand)[N][2],
                                                    float (&o)[N][D / 16][4]) {
#pragma unroll
    for (int s = 0; s < D / 64; ++s) {
      uint4 const v = reinterpret_cast<uint4 const*>(chunk + Chunk::v_codes)[s * kWarp + lane];
      uint32_t const words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t a[4];
        int4_operand(words[j], a);
#pragma unroll
        for (int n = 0; n < N; ++n)
          mma_f16(o[n][4 * s + j], a[0], a[1], a[2], a[3], operand[n][0], operand[n][1]);
      }
    }
  }
};

template <int D>
struct Int8Format {
  using Chunk = Int8Chunk<D>;
  static constexpr bool has_offset = false;
  static constexpr float score_unit = 1.0f;
  static constexpr float low_rows = 1.0f, high_rows = 1.0f;

  static __device__ __forceinline__ Metadata metadata(uint8_t const* chunk, int lane) {
    Metadata m = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float2 const scales = __half22float2(reinterpret_cast<__half2 const*>(chunk + Chunk::metadata)[lane / 4 + 8 * i]);
      m.k_scale[i] = scales.x, m.v_scale[i] = scales.y;
    }
    return m;
  }

  template <int N>
  static __device__ __forceinline__ void raw_scores(uint8_t const* chunk, int lane, QueryCodes<D, N> const& q,
                                                    int (&c)[N][4]) {
#pragma unroll
    for (int s = 0; s < D / 64; ++s) {
      uint4 const first = reinterpret_cast<uint4 const*>(chunk)[2 * s * kWarp + lane];
      uint4 const second = reinterpret_cast<uint4 const*>(chunk)[(2 * s + 1) * kWarp + lane];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint4 const& b = q.words[n][s];
        mma_s8s8(c[n], first.x, first.y, first.z, first.w, b.x, b.y);
        mma_s8s8(c[n], second.x, second.y, second.z, second.w, b.z, b.w);
      }
    }
  }

  template <int N>
  static __device__ __forceinline__ void accumulate(uint8_t const* chunk, int lane, uint32_t const (&operand)[N][2],
                                                    float (&o)[N][D / 16][4]) {
#pragma unroll
    for (int s = 0; s < D / 32; ++s) {
      uint4 const v = reinterpret_cast<uint4 const*>(chunk + Chunk::v_codes)[s * kWarp + lane];
      uint32_t a[2][4];
      int8_operand(v.x, v.y, a[0]);
      int8_operand(v.z, v.w, a[1]);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int n = 0; n < N; ++n)
          mma_f16(o[n][2 * s + j], a[j][0], a[j][1], a[j][2], a[j][3], operand[n][0], operand[n][1]);
    }
  }
};

// Sixteen entries of the side buffer: token-major INT8 rows of D bytes, keys and values apart.
template <int D>
struct SideFormat {
  template <int N>
  static __device__ __forceinline__ void raw_scores(uint8_t const* keys, int lane, QueryCodes<D, N> const& q,
                                                    int (&c)[N][4]) {
    uint8_t const* row = keys + lane / 4 * D + 16 * (lane % 4);
#pragma unroll
    for (int s = 0; s < D / 64; ++s) {
      uint4 const early = *reinterpret_cast<uint4 const*>(row + 64 * s);
      uint4 const late = *reinterpret_cast<uint4 const*>(row + 8 * D + 64 * s);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint4 const& b = q.words[n][s];
        mma_s8s8(c[n], early.x, late.x, early.y, late.y, b.x, b.y);
        mma_s8s8(c[n], early.z, late.z, early.w, late.w, b.z, b.w);
      }
    }
  }

  // A lane's channels are the D / 8 from g * D / 8 on; its tokens 2t, 2t + 1, 2t + 8, 2t + 9.
  template <int N>
  static __device__ __forceinline__ void accumulate(uint8_t const* values, int lane, uint32_t const (&operand)[N][2],
                                                    float (&o)[N][D / 16][4]) {
    uint8_t const* row = values + 2 * (lane % 4) * D + lane / 4 * (D / 8);
#pragma unroll
    for (int x = 0; x < D / 64; ++x) {
      uint2 const r0 = *reinterpret_cast<uint2 const*>(row + 8 * x), r1 = *reinterpret_cast<uint2 const*>(row + D + 8 * x);
      uint2 const r8 = *reinterpret_cast<uint2 const*>(row + 8 * D + 8 * x);
      uint2 const r9 = *reinterpret_cast<uint2 const*>(row + 9 * D + 8 * x);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int const pair = j & 1 ? 0x7362 : 0x5140;  // bytes 2, 3 or 0, 1 of both tokens
        uint32_t const early = j < 2 ? __byte_perm(r0.x, r1.x, pair) : __byte_perm(r0.y, r1.y, pair);
        uint32_t const late = j < 2 ? __byte_perm(r8.x, r9.x, pair) : __byte_perm(r8.y, r9.y, pair);
        uint32_t a[4];
        int8_operand(early, late, a);
#pragma unroll
        for (int n = 0; n < N; ++n)
          mma_f16(o[n][4 * x + j], a[0], a[1], a[2], a[3], operand[n][0], operand[n][1]);
      }
    }
  }
};

}  // namespace kv4rl
