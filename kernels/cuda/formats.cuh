// The tile formats: how 16 tokens of one KV head give scores and take probabilities (lane = 4g + t).
// Tile: the lane's share of a chunk, from its shared-memory address; values are loaded once the scores need no keys.
// scores: log2-domain scores, s[n][0, 1] for token g and heads 8n + 2t, + 1; s[n][2, 3] for token g + 8.
// accumulate: o += operand * value code, in the format's own unit (low_rows, high_rows of channel rows g and g + 8).
#pragma once
#include "dequantise.cuh"
#include "layout.cuh"
#include "mma.cuh"
#include "query.cuh"
#include "softmax.cuh"

namespace kv4rl {

__device__ __forceinline__ float2 halves(uint32_t word) {
  return __half22float2(*reinterpret_cast<__half2 const*>(&word));
}

template <int D, int N>
__device__ __forceinline__ void symmetric_scores(int const (&c)[N][4], QueryCodes<D, N> const& q,
                                                 float const (&k_scale)[2], float (&s)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = k_scale[i / 2] * (float(c[n][i]) * q.unit[n][i & 1]);
}

template <int D>
struct Int4Format {
  using Chunk = Int4Chunk<D>;
  template <int N>
  using Query = QueryCodes<D, N>;
  static constexpr bool has_offset = true, has_bf16_operand = false, has_byte_operand = false;
  static constexpr bool in_registers = true;  // a tile whose values are loaded no longer needs its chunk
  static constexpr float low_rows = kLowNibble, high_rows = kHighNibble;

  struct Tile {
    uint4 k[D / 64], v[D / 64];
    uint2 numbers[2];

    __device__ __forceinline__ void load_keys(uint32_t chunk, int lane) {
#pragma unroll
      for (int s = 0; s < D / 64; ++s) k[s] = load_shared_16(chunk + (s * kWarp + lane) * 16);
#pragma unroll
      for (int i = 0; i < 2; ++i) numbers[i] = load_shared_8(chunk + Chunk::metadata + (lane / 4 + 8 * i) * 8);
    }

    __device__ __forceinline__ void load_values(uint32_t chunk, int lane) {
#pragma unroll
      for (int s = 0; s < D / 64; ++s) v[s] = load_shared_16(chunk + Chunk::v_codes + (s * kWarp + lane) * 16);
    }

    __device__ __forceinline__ Metadata metadata() const {
      Metadata m;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float2 const key = halves(numbers[i].x), value = halves(numbers[i].y);
        m.k_scale[i] = key.x, m.k_offset[i] = key.y, m.v_scale[i] = value.x, m.v_offset[i] = value.y;
      }
      return m;
    }
  };

  template <int N>
  static __device__ __forceinline__ void scores(Tile const& tile, QueryCodes<D, N> const& q, Metadata const& m,
                                                float (&s_out)[N][4]) {
    constexpr uint32_t low = 0x0F0F0F0Fu, high = 0xF0F0F0F0u;
    int c_low[N][4] = {}, c_high[N][4] = {};
#pragma unroll
    for (int s = 0; s < D / 64; ++s) {
      uint4 const& k = tile.k[s];
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
      for (int i = 0; i < 4; ++i) {
        // High nibbles were multiplied where they stand, 16 times too large; below 2^24: exact in FP32.
        float const dot = float(16 * c_low[n][i] + c_high[n][i]) * (q.unit[n][i & 1] * (1.0f / 16));
        s_out[n][i] = fmaf(m.k_offset[i / 2], q.code_sum[n][i & 1], m.k_scale[i / 2] * dot);
      }
  }

  template <int N>
  static __device__ __forceinline__ void accumulate(Tile const& tile, uint32_t const (&operand)[N][2],
                                                    float (&o)[N][D / 16][4], int) {
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
      uint4 const& v = tile.v[j / 4];
      uint32_t a[4];
      int4_operand(j % 4 == 0 ? v.x : j % 4 == 1 ? v.y : j % 4 == 2 ? v.z : v.w, a);
#pragma unroll
      for (int n = 0; n < N; ++n) mma_f16(o[n][j], a[0], a[1], a[2], a[3], operand[n][0], operand[n][1]);
    }
  }
};

// INT4 pages with the paper's 8-bit P: two tiles are the 32 tokens of one integer MMA (one, beside a tile of zeros).
template <int D>
struct Int4BytesFormat : Int4Format<D> {
  static constexpr bool has_byte_operand = true;
  static constexpr float low_rows = 1.0f, high_rows = 16.0f;  // high nibbles are multiplied where they stand

  template <int N, int T>
  static __device__ __forceinline__ void accumulate_bytes(typename Int4Format<D>::Tile const (&tile)[T],
                                                          uint32_t const (&operand)[T][N], float const (&unit)[N][2],
                                                          float (&o)[N][D / 16][4]) {
    static_assert(T <= 2, "an integer MMA takes the tokens of two tiles");
    constexpr uint32_t low = 0x0F0F0F0Fu, high = 0xF0F0F0F0u;
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
      uint32_t word[2] = {};
#pragma unroll
      for (int i = 0; i < T; ++i) {
        uint4 const& v = tile[i].v[j / 4];
        word[i] = j % 4 == 0 ? v.x : j % 4 == 1 ? v.y : j % 4 == 2 ? v.z : v.w;
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        int c[4] = {};
        mma_u8u8(c, word[0] & low, word[0] & high, word[1] & low, word[1] & high, operand[0][n],
                 T > 1 ? operand[T - 1][n] : 0u);
#pragma unroll
        for (int k = 0; k < 4; ++k) o[n][j][k] = fmaf(float(c[k]), unit[n][k & 1], o[n][j][k]);
      }
    }
  }
};

template <int D>
struct Int8Format {
  using Chunk = Int8Chunk<D>;
  template <int N>
  using Query = QueryCodes<D, N>;
  static constexpr bool has_offset = false, has_bf16_operand = false, has_byte_operand = false, in_registers = true;
  static constexpr float low_rows = 1.0f, high_rows = 1.0f;

  struct Tile {
    uint4 k[D / 32], v[D / 32];
    uint32_t numbers[2];

    __device__ __forceinline__ void load_keys(uint32_t chunk, int lane) {
#pragma unroll
      for (int s = 0; s < D / 32; ++s) k[s] = load_shared_16(chunk + (s * kWarp + lane) * 16);
#pragma unroll
      for (int i = 0; i < 2; ++i) numbers[i] = load_shared_4(chunk + Chunk::metadata + (lane / 4 + 8 * i) * 4);
    }

    __device__ __forceinline__ void load_values(uint32_t chunk, int lane) {
#pragma unroll
      for (int s = 0; s < D / 32; ++s) v[s] = load_shared_16(chunk + Chunk::v_codes + (s * kWarp + lane) * 16);
    }

    __device__ __forceinline__ Metadata metadata() const {
      Metadata m = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float2 const scales = halves(numbers[i]);
        m.k_scale[i] = scales.x, m.v_scale[i] = scales.y;
      }
      return m;
    }
  };

  template <int N>
  static __device__ __forceinline__ void scores(Tile const& tile, QueryCodes<D, N> const& q, Metadata const& m,
                                                float (&s_out)[N][4]) {
    int c[N][4] = {};
#pragma unroll
    for (int s = 0; s < D / 64; ++s) {
      uint4 const &first = tile.k[2 * s], &second = tile.k[2 * s + 1];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint4 const& b = q.words[n][s];
        mma_s8s8(c[n], first.x, first.y, first.z, first.w, b.x, b.y);
        mma_s8s8(c[n], second.x, second.y, second.z, second.w, b.z, b.w);
      }
    }
    symmetric_scores(c, q, m.k_scale, s_out);
  }

  template <int N>
  static __device__ __forceinline__ void accumulate(Tile const& tile, uint32_t const (&operand)[N][2],
                                                    float (&o)[N][D / 16][4], int) {
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
      uint4 const& v = tile.v[j / 2];
      uint32_t a[4];
      int8_operand(j % 2 ? v.z : v.x, j % 2 ? v.w : v.y, a);
#pragma unroll
      for (int n = 0; n < N; ++n) mma_f16(o[n][j], a[0], a[1], a[2], a[3], operand[n][0], operand[n][1]);
    }
  }
};

// Sixteen entries of the side buffer: token-major INT8 rows of D bytes; keys in one ring slot, values in the next.
template <int D>
struct SideFormat {
  template <int N>
  static __device__ __forceinline__ void scores(uint32_t keys, int lane, QueryCodes<D, N> const& q,
                                                float const (&k_scale)[2], float (&s_out)[N][4]) {
    int c[N][4] = {};
    uint32_t const row = keys + lane / 4 * D + 16 * (lane % 4);
#pragma unroll
    for (int s = 0; s < D / 64; ++s) {
      uint4 const early = load_shared_16(row + 64 * s), late = load_shared_16(row + 8 * D + 64 * s);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint4 const& b = q.words[n][s];
        mma_s8s8(c[n], early.x, late.x, early.y, late.y, b.x, b.y);
        mma_s8s8(c[n], early.z, late.z, early.w, late.w, b.z, b.w);
      }
    }
    symmetric_scores(c, q, k_scale, s_out);
  }

  // A lane's channels are the D / 8 from g * D / 8 on; its tokens 2t, 2t + 1, 2t + 8, 2t + 9.
  template <int N>
  static __device__ __forceinline__ void accumulate(uint32_t values, int lane, uint32_t const (&operand)[N][2],
                                                    float (&o)[N][D / 16][4]) {
    uint32_t const row = values + 2 * (lane % 4) * D + lane / 4 * (D / 8);
#pragma unroll
    for (int x = 0; x < D / 64; ++x) {
      uint2 const r0 = load_shared_8(row + 8 * x), r1 = load_shared_8(row + D + 8 * x);
      uint2 const r8 = load_shared_8(row + 8 * D + 8 * x), r9 = load_shared_8(row + 9 * D + 8 * x);
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

// Unquantised 16-bit pages (`bf16`): token-major rows of D elements, keys and values apart, keys not rotated.
template <int D, bool kBf16>
struct PlainFormat {
  struct Chunk {
    static constexpr int v_codes = 32 * D, bytes = 64 * D;
  };
  template <int N>
  using Query = QueryElements<D, N>;
  static constexpr bool has_offset = false, has_bf16_operand = kBf16, has_byte_operand = false, in_registers = false;
  static constexpr float low_rows = 1.0f, high_rows = 1.0f;

  struct Tile {
    uint32_t chunk;
    int lane;

    __device__ __forceinline__ void load_keys(uint32_t from, int its_lane) { chunk = from, lane = its_lane; }
    __device__ __forceinline__ void load_values(uint32_t, int) {}  // read where they are used: too many registers

    __device__ __forceinline__ Metadata metadata() const {
      Metadata m = {};
      m.v_scale[0] = m.v_scale[1] = 1.0f;
      return m;
    }
  };

  template <int N>
  static __device__ __forceinline__ void scores(Tile const& tile, QueryElements<D, N> const& q, Metadata const&,
                                                float (&s_out)[N][4]) {
    uint32_t const row = tile.chunk + tile.lane / 4 * 2 * D + 16 * (tile.lane % 4);
#pragma unroll
    for (int n = 0; n < N; ++n) s_out[n][0] = s_out[n][1] = s_out[n][2] = s_out[n][3] = 0.0f;
#pragma unroll
    for (int s = 0; s < D / 32; ++s) {
      uint4 const early = load_shared_16(row + 64 * s), late = load_shared_16(row + 16 * D + 64 * s);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint4 const& b = q.words[n][s];
        mma_16bit<kBf16>(s_out[n], early.x, late.x, early.y, late.y, b.x, b.y);
        mma_16bit<kBf16>(s_out[n], early.z, late.z, early.w, late.w, b.z, b.w);
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s_out[n][i] *= q.scale;
  }

  // `valid` tokens of the tile count; what lies behind them may be NaN, and 0 * NaN is NaN: read it as 0.
  template <int N>
  static __device__ __forceinline__ void accumulate(Tile const& tile, uint32_t const (&operand)[N][2],
                                                    float (&o)[N][D / 16][4], int valid) {
    int const first = 2 * (tile.lane % 4);
    uint32_t const row = tile.chunk + Chunk::v_codes + first * 2 * D + tile.lane / 4 * (D / 4);
#pragma unroll
    for (int x = 0; x < D / 32; ++x) {
      uint2 r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int const token = i % 2 + i / 2 * 8;  // beyond `first`
        r[i] = load_shared_8(row + token * 2 * D + 8 * x);
        if (first + token >= valid) r[i] = {0u, 0u};
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t const w[4] = {j ? r[0].y : r[0].x, j ? r[1].y : r[1].x, j ? r[2].y : r[2].x, j ? r[3].y : r[3].x};
        uint32_t const a[4] = {__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[0], w[1], 0x7632),
                               __byte_perm(w[2], w[3], 0x5410), __byte_perm(w[2], w[3], 0x7632)};
#pragma unroll
        for (int n = 0; n < N; ++n)
          mma_16bit<kBf16>(o[n][2 * x + j], a[0], a[1], a[2], a[3], operand[n][0], operand[n][1]);
      }
    }
  }
};

}  // namespace kv4rl
