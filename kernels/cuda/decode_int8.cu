// decode_int8: attention over INT8 pages (kv8). One configuration a build, as decode_int4.cu.
#include "launch.cuh"

namespace kv4rl {

using Configuration = Config<Int8Format<HEAD_DIM>, HEAD_DIM, QUERY_TILES, WARPS, STAGES, TILES, false>;
constexpr int kThreads = (WARPS + 1) * kWarp;

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    decode_int8_kernel(__grid_constant__ DecodeArguments const a) {
  decode<Configuration>(a);
}

extern "C" int describe_decode_int8(int group, int entries, int* shared_bytes, int* blocks) {
  void const* kernel = reinterpret_cast<void const*>(decode_int8_kernel);
  return describe<Configuration>(kernel, kThreads, group, entries, shared_bytes, blocks);
}

extern "C" int launch_decode_int8(DecodeArguments const* a, int shared_bytes, int blocks, cudaStream_t stream) {
  return launch_early(decode_int8_kernel, blocks, kThreads, shared_bytes, stream, *a);
}

}  // namespace kv4rl
