// plan: once a decode step, for all its layers: the list of units, heaviest first. One block; no host involved, so a
// captured graph serves any mix of lengths.
#include <cstdint>

#include "schedule.cuh"

namespace kv4rl {

struct PlanArguments {
  int64_t const* context_tokens;  // [rows]
  int64_t const* slots;           // [rows]; null without a side buffer
  Unit* units;
  Counters* counters;
  int rows, sink, recent, chunk_weight;
};

constexpr int kPlanThreads = 1024;
constexpr int kBuckets = 128, kBucketWeight = 2;  // by weight; the last bucket takes all that is heavier

struct Chunk {
  int first_tile, last_tile, bucket;
};

__device__ __forceinline__ Chunk chunk_of(Tiles const& t, int i, int chunks, int chunk_weight) {
  int const first = chunk_start(t, i, chunks, chunk_weight), last = chunk_start(t, i + 1, chunks, chunk_weight);
  int const bucket = (t.start_weight(last) - t.start_weight(first)) / kBucketWeight;
  return {first, last, bucket < kBuckets ? bucket : kBuckets - 1};
}

extern "C" __global__ void __launch_bounds__(kPlanThreads) plan_kernel(PlanArguments const a) {
  __shared__ int place[kBuckets];
  __shared__ int partials;
  for (int i = threadIdx.x; i < kBuckets; i += kPlanThreads) place[i] = 0;
  if (threadIdx.x == 0) partials = 0;
  __syncthreads();
  for (int row = threadIdx.x; row < a.rows; row += kPlanThreads) {
    Tiles const t = tiles_of(static_cast<int>(a.context_tokens[row]), a.sink, a.recent);
    int const chunks = chunk_count(t, a.chunk_weight);
    for (int i = 0; i < chunks; ++i) atomicAdd(&place[chunk_of(t, i, chunks, a.chunk_weight).bucket], 1);
  }
  __syncthreads();
  if (threadIdx.x == 0) {  // exclusive sum, heaviest bucket first
    int sum = 0;
    for (int i = kBuckets - 1; i >= 0; --i) {
      int const count = place[i];
      place[i] = sum;
      sum += count;
    }
    *a.counters = Counters{sum, 0, 0, 0};
  }
  __syncthreads();
  for (int row = threadIdx.x; row < a.rows; row += kPlanThreads) {
    int const context = static_cast<int>(a.context_tokens[row]);
    Tiles const t = tiles_of(context, a.sink, a.recent);
    int const chunks = chunk_count(t, a.chunk_weight);
    int const partial = chunks > 1 ? atomicAdd(&partials, chunks) : -1;
    int const slot = a.slots == nullptr ? 0 : static_cast<int>(a.slots[row]);
    for (int i = 0; i < chunks; ++i) {
      Chunk const chunk = chunk_of(t, i, chunks, a.chunk_weight);
      a.units[atomicAdd(&place[chunk.bucket], 1)] = {row, context, slot, chunk.first_tile, chunk.last_tile, i, chunks,
                                                     partial};
    }
  }
  __threadfence();  // decode reads units before it waits for the launch before it (Producer::prepare)
}

extern "C" int launch_plan(PlanArguments const* arguments, cudaStream_t stream) {
  plan_kernel<<<1, kPlanThreads, 0, stream>>>(*arguments);
  return cudaGetLastError();
}

}  // namespace kv4rl
