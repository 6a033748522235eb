// The kernel itself, and its launch from the host.
#pragma once
#include "launch_early.cuh"
#include "merge.cuh"
#include "stream.cuh"

namespace kv4rl {

template <class C>
__device__ __forceinline__ void decode(DecodeArguments const& a) {
  extern __shared__ uint8_t dynamic[];
  uint8_t* const base = dynamic + (-shared_address(dynamic) & 127);
  uint32_t const address = shared_address(base);
  for (int i = threadIdx.x; i < kItemsAhead * C::query_bytes / 4; i += blockDim.x)
    reinterpret_cast<int*>(base + C::queries)[i] = 0;  // rows beyond the group stay zero
  if (threadIdx.x == 0) {
    constexpr int kReaders = C::W * kArrivingLanes;
    for (int i = 0; i < C::R; ++i)
      barrier_init(address + C::full + 8 * i, 1), barrier_init(address + C::empty + 8 * i, kReaders);
    for (int i = 0; i < kItemsAhead; ++i)
      barrier_init(address + C::item_full + 8 * i, kArrivingLanes),
          barrier_init(address + C::item_empty + 8 * i, kReaders);
    barrier_init(address + C::written, 1), barrier_init(address + C::counted, 1);
    barriers_ready();
  }
  __syncthreads();
  int const warp = __shfl_sync(~0u, threadIdx.x / kWarp, 0), lane = lane_index();
  Block const block{a, base, address, lane};
  if (warp == C::W) {
    Producer<C> producer{block};
    producer.prepare();
    await_previous_launch();
    let_next_launch_begin();
    producer.run();
  } else {
    await_previous_launch();
    let_next_launch_begin();
    Consumer<C> consumer{block, warp};
    consumer.run();
  }
}

// Dynamic shared memory and resident blocks of the whole device, for a group of query heads and a side buffer of
// `entries` positions. Returns a CUDA error code; *blocks is 0 where a block does not fit.
template <class C>
int describe(void const* kernel, int threads, int group, int entries, int* shared_bytes, int* blocks) {
  *shared_bytes = C::bytes(group, entries);
  int device = 0, processors = 0, most = 0, each = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  *blocks = 0;
  if (error != cudaSuccess || *shared_bytes > most) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, *shared_bytes);
  *blocks = processors * each;
  return error;
}

}  // namespace kv4rl
