// The exact merge (Eq. A1) of partial softmaxes: of the warps of a block, then of the chunks of a request.
// A partial is, per head, D un-normalised sums with the maximum they refer to (log2 domain) and the sum of p.
#pragma once
#include <cuda_bf16.h>

#include "decode.cuh"

namespace kv4rl {

constexpr int kConsumerBarrier = 1;

template <int W>
__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kConsumerBarrier), "n"(W * kWarp) : "memory");
}

// Four channels of one head.
struct Share {
  float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
  float top = -INFINITY, total = 0.0f;
};

// What other blocks wrote is read from L2, what this block's warps wrote from shared memory.
template <bool kGlobal, class T>
__device__ __forceinline__ T load(float const* from) {
  T const* typed = reinterpret_cast<T const*>(from);
  if constexpr (kGlobal) return __ldcg(typed);
  return *typed;
}

// `count` partials at `stride` floats, merged in order. An empty one (total 0) weighs zero; NaN stays NaN.
template <bool kGlobal, int D>
__device__ __forceinline__ Share merge_partials(float const* head, int channel, int count, int stride) {
  Share merged;
#pragma unroll 4
  for (int i = 0; i < count; ++i) merged.top = fmaxf(merged.top, load<kGlobal, float>(head + i * stride + D));
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    float const* partial = head + i * stride;
    float2 const stats = load<kGlobal, float2>(partial + D);  // top, total
    float const total = stats.y;
    float const weight = total == 0.0f ? 0.0f : exp2_approx(stats.x - merged.top);
    float4 const o = load<kGlobal, float4>(partial + channel);
    merged.o.x = fmaf(weight, o.x, merged.o.x);
    merged.o.y = fmaf(weight, o.y, merged.o.y);
    merged.o.z = fmaf(weight, o.z, merged.o.z);
    merged.o.w = fmaf(weight, o.w, merged.o.w);
    merged.total = fmaf(weight, total, merged.total);
  }
  return merged;
}

__device__ __forceinline__ void store_output(DecodeArguments const& a, int64_t row, int head_dim, int channel,
                                             Share const& share) {
  float const norm = share.total == 0.0f ? 0.0f : 1.0f / share.total;
  float const o[4] = {share.o.x * norm, share.o.y * norm, share.o.z * norm, share.o.w * norm};
  int64_t const at = row * head_dim + channel;
  if (a.out_type == 2) {
    *reinterpret_cast<float4*>(static_cast<float*>(a.out) + at) = {o[0], o[1], o[2], o[3]};
  } else if (a.out_type == 1) {
    __half2 const pairs[2] = {__floats2half2_rn(o[0], o[1]), __floats2half2_rn(o[2], o[3])};
    *reinterpret_cast<uint2*>(static_cast<__half*>(a.out) + at) = *reinterpret_cast<uint2 const*>(pairs);
  } else {
    __nv_bfloat162 const pairs[2] = {__floats2bfloat162_rn(o[0], o[1]), __floats2bfloat162_rn(o[2], o[3])};
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(a.out) + at) = *reinterpret_cast<uint2 const*>(pairs);
  }
  if (channel == 0 && a.lse != nullptr)
    a.lse[row] = share.total == 0.0f ? -INFINITY : (share.top + log2f(share.total)) * kLn2;
}

template <class C>
__device__ __forceinline__ void Consumer<C>::finish(Item const& work) {
  constexpr int sums = C::sums;
  float* const shares = reinterpret_cast<float*>(base + C::merge);
  float const scale = 1.0f / softmax.inverse;
  softmax.scale_output(scale / Format::low_rows, scale / Format::high_rows);
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float const total = sum_over_tokens(softmax.total[n][h]), offset = sum_over_tokens(softmax.offset[n][h]);
      int const head = 8 * n + 2 * (lane % 4) + h;
      if (head >= a.group) continue;
      float* mine = shares + (warp * a.group + head) * sums;
#pragma unroll
      for (int j = 0; j < D / 16; j += 2)
        *reinterpret_cast<float4*>(mine + lane / 4 * (D / 8) + 2 * j) = {
            softmax.o[n][j][h] + offset, softmax.o[n][j][h + 2] + offset, softmax.o[n][j + 1][h] + offset,
            softmax.o[n][j + 1][h + 2] + offset};
      if (lane / 4 == 0) mine[D] = softmax.top[n][h], mine[D + 1] = total;
    }
  consumers_sync<W>();

  int const thread = warp * kWarp + lane;
  Unit const& unit = work.unit;
  int64_t const first_row = (int64_t(unit.request) * a.kv_heads + work.head) * a.group;
  int const record = a.kv_heads * a.group * sums;  // floats between the chunks of one request
  float* chunks = a.partial + (int64_t(unit.partial) * a.kv_heads + work.head) * a.group * sums;
  for (int i = thread; i < a.group * (D / 4); i += W * kWarp) {
    int const head = i / (D / 4), channel = i % (D / 4) * 4;
    Share const share = merge_partials<false, D>(shares + head * sums, channel, W, a.group * sums);
    if (unit.chunks == 1) {
      store_output(a, first_row + head, D, channel, share);
      continue;
    }
    float* mine = chunks + int64_t(unit.chunk) * record + head * sums;
    *reinterpret_cast<float4*>(mine + channel) = share.o;
    if (channel == 0) mine[D] = share.top, mine[D + 1] = share.total;
  }
  if (unit.chunks > 1) __threadfence();
  consumers_sync<W>();  // `shares` is free again, and all of this chunk is written
  if (unit.chunks == 1) return;

  int volatile* is_last = reinterpret_cast<int*>(base + C::is_last);
  int* arrivals = a.arrivals + int64_t(unit.request) * a.kv_heads + work.head;
  if (thread == 0) {
    *is_last = atomicAdd(arrivals, 1) == unit.chunks - 1;
    __threadfence();
  }
  consumers_sync<W>();
  if (*is_last == 0) return;
  for (int i = thread; i < a.group * (D / 4); i += W * kWarp) {
    int const head = i / (D / 4), channel = i % (D / 4) * 4;
    Share const share = merge_partials<true, D>(chunks + head * sums, channel, unit.chunks, record);
    store_output(a, first_row + head, D, channel, share);
  }
  if (thread == 0) *arrivals = 0;
}

}  // namespace kv4rl
