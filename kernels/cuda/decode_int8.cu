// decode_int8: attention over INT8 pages (kv8). One configuration a build: HEAD_DIM, QUERY_TILES (of 8 heads), WARPS,
// BLOCKS (per SM).
#include "launch.cuh"

namespace kv4rl {

using Format = Int8Format<HEAD_DIM>;
using Memory = Shared<Format, HEAD_DIM, QUERY_TILES, WARPS>;
constexpr int kThreads = (WARPS + 1) * kWarp;

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    decode_int8_kernel(__grid_constant__ DecodeArguments const a) {
  decode<Format, HEAD_DIM, QUERY_TILES, WARPS, false>(a);
}

extern "C" int describe_decode_int8(int ring_rows, int group, int* shared_bytes, int* blocks) {
  return describe<Memory>(reinterpret_cast<void const*>(decode_int8_kernel), kThreads, ring_rows, group, shared_bytes,
                          blocks);
}

extern "C" int launch_decode_int8(DecodeArguments const* a, int shared_bytes, int blocks, cudaStream_t stream) {
  decode_int8_kernel<<<blocks, kThreads, shared_bytes, stream>>>(*a);
  return cudaGetLastError();
}

}  // namespace kv4rl
