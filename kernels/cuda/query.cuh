// One lane's part of the query rows of a KV head's group: the B operand, and the factors of its heads.
#pragma once
#include "layout.cuh"
#include "shared_memory.cuh"

namespace kv4rl {

// INT8 codes. Words: of head 8n + g, channels 64s + 16t to + 15, in the order of the stored keys.
template <int D, int N>
struct QueryCodes {
  static constexpr int row = kQueryRow<D>;
  uint4 words[N][D / 64];
  float unit[N][2];      // scale * log2(e) / sqrt(D) of heads 8n + 2t, + 1
  float code_sum[N][2];  // unit * sum of the codes

  // rows: shared-memory address of the item's query rows.
  __device__ __forceinline__ void load(uint32_t rows, int lane, float score_scale) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      uint32_t const mine = rows + (8 * n + lane / 4) * row + 16 * (lane % 4);
#pragma unroll
      for (int s = 0; s < D / 64; ++s) words[n][s] = load_shared_16(mine + 64 * s);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint2 const tail = load_shared_8(rows + (8 * n + 2 * (lane % 4) + h) * row + D);  // QueryTail
        unit[n][h] = __uint_as_float(tail.x) * score_scale;
        code_sum[n][h] = __uint_as_float(tail.y) * unit[n][h];
      }
    }
  }
};

// 16-bit elements. Words: of head 8n + g, channels 32s + 8t to + 7.
template <int D, int N>
struct QueryElements {
  static constexpr int row = 2 * D + 16;
  uint4 words[N][D / 32];
  float scale;

  __device__ __forceinline__ void load(uint32_t rows, int lane, float score_scale) {
    scale = score_scale;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      uint32_t const mine = rows + (8 * n + lane / 4) * row + 16 * (lane % 4);
#pragma unroll
      for (int s = 0; s < D / 32; ++s) words[n][s] = load_shared_16(mine + 64 * s);
    }
  }
};

}  // namespace kv4rl
