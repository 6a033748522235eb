// The kernel itself, and its launch from the host.
#pragma once
#include "merge.cuh"

namespace kv4rl {

template <class Format, int D, int N, int W, bool kProtected>
__device__ __forceinline__ void decode(DecodeArguments const& a) {
  extern __shared__ uint8_t dynamic[];
  Shared<Format, D, N, W> const memory(dynamic, a.ring_rows, a.group);
  for (int i = threadIdx.x; i < kItemsAhead * memory.query / 4; i += blockDim.x)
    reinterpret_cast<int*>(memory.queries)[i] = 0;  // rows beyond the group stay zero
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.ring_rows; ++i) barrier_init(&memory.full[i], 1), barrier_init(&memory.empty[i], W);
    for (int i = 0; i < kItemsAhead; ++i) barrier_init(&memory.item_full[i], 1), barrier_init(&memory.item_empty[i], W);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  int const warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (warp == W) {
    Producer<Format, D, N, W, kProtected>{a, memory, lane}.run();
  } else {
    Consumer<Format, D, N, W, kProtected> consumer{a, memory, lane, warp};
    consumer.run();
  }
}

// Dynamic shared memory and grid of a configuration; cached by the caller. Returns a CUDA error code.
template <class Memory>
int describe(void const* kernel, int threads, int ring_rows, int group, int* shared_bytes, int* blocks) {
  *shared_bytes = Memory::bytes(ring_rows, group);
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, *shared_bytes);
  int device = 0, processors = 0, each = 0;
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, *shared_bytes);
  *blocks = processors * each;
  return error;
}

}  // namespace kv4rl
