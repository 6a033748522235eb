// The exact merge (Eq. A1) of partial softmaxes: of the warps of a block, then of the chunks of a request.
// A partial is, per head, D un-normalised sums with the maximum they refer to (log2 domain) and the sum of p.
#pragma once
#include <cuda_bf16.h>

#include "attend.cuh"

namespace kv4rl {

// Four channels of one head.
struct Share {
  float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
  float top = -INFINITY, total = 0.0f;

  __device__ __forceinline__ void rescale(float factor) {
    o = {o.x * factor, o.y * factor, o.z * factor, o.w * factor};
    total *= factor;
  }

  __device__ __forceinline__ void add(float weight, float4 const& other, float other_total) {
    o = {fmaf(weight, other.x, o.x), fmaf(weight, other.y, o.y), fmaf(weight, other.z, o.z), fmaf(weight, other.w, o.w)};
    total = fmaf(weight, other_total, total);
  }
};

// What a partial with maximum `top` counts for beside one with maximum `merged_top`.
__device__ __forceinline__ float weight_of(float top, float total, float merged_top) {
  return total == 0.0f ? 0.0f : exp2_approx(top - merged_top);
}

// What other blocks wrote is read from L2, what this block's warps wrote from shared memory.
template <bool kGlobal, class T>
__device__ __forceinline__ T load(float const* from) {
  T const* typed = reinterpret_cast<T const*>(from);
  if constexpr (kGlobal) return __ldcg(typed);
  return *typed;
}

constexpr int kAtOnce = 4;  // partials whose loads are under way together

// `count` partials at `stride` floats, merged in order in one pass: what is summed moves to a new maximum with each
// kAtOnce of them. An empty one (total 0) weighs zero; NaN stays NaN.
template <bool kGlobal, int D>
__device__ __forceinline__ Share merge_partials(float const* head, int channel, int count, int stride) {
  Share merged;
  for (int first = 0; first < count; first += kAtOnce) {
    float2 stats[kAtOnce];  // top, total
    float4 o[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float const* partial = head + min(first + i, count - 1) * stride;  // beyond the last: it once more, not counted
      stats[i] = load<kGlobal, float2>(partial + D);
      o[i] = load<kGlobal, float4>(partial + channel);
    }
    float top = merged.top;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) top = fmaxf(top, stats[i].x);
    merged.rescale(weight_of(merged.top, merged.total, top));
    merged.top = top;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + i < count) merged.add(weight_of(stats[i].x, stats[i].y, top), o[i], stats[i].y);
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
__device__ __forceinline__ void Consumer<C>::write_share() {
  float const scale = 1.0f / softmax.inverse;
  softmax.scale_output(scale / Format::low_rows, scale / Format::high_rows);
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float const total = sum_over_tokens(softmax.total[n][h]), offset = sum_over_tokens(softmax.offset[n][h]);
      int const head = 8 * n + 2 * (lane % 4) + h;
      if (head >= a.group) continue;
      float* mine = reinterpret_cast<float*>(base + C::merge) + (warp * a.group + head) * C::sums;
#pragma unroll
      for (int j = 0; j < D / 16; j += 2)
        *reinterpret_cast<float4*>(mine + lane / 4 * (D / 8) + 2 * j) = {
            softmax.o[n][j][h] + offset, softmax.o[n][j][h + 2] + offset, softmax.o[n][j + 1][h] + offset,
            softmax.o[n][j + 1][h + 2] + offset};
      if (lane / 4 == 0) mine[D] = softmax.top[n][h], mine[D + 1] = total;
    }
}

// Floats from a request's first partial to those of this item's chunk 0; chunks follow `chunk_stride` apart.
template <class C>
__device__ __forceinline__ float* Consumer<C>::partials(Item const& work) const {
  return a.partial + (int64_t(work.unit.partial) * a.kv_heads + work.head) * a.group * C::sums;
}

template <class C>
__device__ __forceinline__ void Consumer<C>::merge_warps(Item const& work) {
  float const* shares = reinterpret_cast<float const*>(base + C::merge);
  int64_t const first_row = (int64_t(work.unit.request) * a.kv_heads + work.head) * a.group;
  for (int i = warp * kWarp + lane; i < a.group * (D / 4); i += W * kWarp) {
    int const head = i / (D / 4), channel = i % (D / 4) * 4;
    Share const share = merge_partials<false, D>(shares + head * C::sums, channel, W, a.group * C::sums);
    if (work.unit.chunks == 1) {
      store_output(a, first_row + head, D, channel, share);
      continue;
    }
    float* mine = partials(work) + int64_t(work.unit.chunk) * chunk_stride() + head * C::sums;
    *reinterpret_cast<float4*>(mine + channel) = share.o;
    if (channel == 0) *reinterpret_cast<float2*>(mine + D) = {share.top, share.total};
  }
}

template <class C>
__device__ __forceinline__ void Consumer<C>::merge_chunks(Item const& work) {
  int64_t const group_row = int64_t(work.unit.request) * a.kv_heads + work.head;
  for (int i = warp * kWarp + lane; i < a.group * (D / 4); i += W * kWarp) {
    int const head = i / (D / 4), channel = i % (D / 4) * 4;
    Share const share =
        merge_partials<true, D>(partials(work) + head * C::sums, channel, work.unit.chunks, chunk_stride());
    store_output(a, group_row * a.group + head, D, channel, share);
  }
  if (warp == 0 && lane == 0) a.arrivals[group_row] = 0;
}

// The block whose chunk is the last to arrive merges the request's chunks, in their own order. The streaming warp counts
// arrivals, since publishing a chunk takes a microsecond: the merge is done at the end of the block's next item (or of all).
template <class C>
__device__ __forceinline__ void Consumer<C>::finish(Item const& work) {
  write_share();
  named_barrier<W * kWarp>();
  merge_warps(work);
  merge_deferred();
  named_barrier<W * kWarp>();  // the shares are free again, and all of this chunk is written
  waiting = work.unit.chunks > 1;
  if (waiting && warp == 0 && lane == 0) {
    reinterpret_cast<Deferred*>(base + C::deferred)->item = work;
    barrier_arrive(address + C::written);
  }
}

template <class C>
__device__ __forceinline__ void Consumer<C>::merge_deferred() {
  if (!waiting) return;
  barrier_wait(address + C::counted, counted_parity);
  counted_parity ^= 1;
  Deferred const* deferred = reinterpret_cast<Deferred const*>(base + C::deferred);
  if (deferred->last) merge_chunks(deferred->item);
}

}  // namespace kv4rl
