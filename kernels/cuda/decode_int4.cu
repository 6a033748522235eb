// decode_int4: attention over INT4 pages (kv4), and, with PROTECTED, over the INT8 sink and recent entries in the same
// launch (kv4rl). One configuration a build: HEAD_DIM, QUERY_TILES (of 8 heads), PROTECTED, WARPS, BLOCKS (per SM),
// STAGES (of the ring), TILES (a warp takes at once), BYTES (P in 8 bits, as the paper's A.3; else FP16).
#include <type_traits>

#include "launch.cuh"

namespace kv4rl {

using Format = std::conditional_t<BYTES, Int4BytesFormat<HEAD_DIM>, Int4Format<HEAD_DIM>>;
using Configuration = Config<Format, HEAD_DIM, QUERY_TILES, WARPS, STAGES, TILES, PROTECTED>;
constexpr int kThreads = (WARPS + 1) * kWarp;

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    decode_int4_kernel(__grid_constant__ DecodeArguments const a) {
  decode<Configuration>(a);
}

extern "C" int describe_decode_int4(int group, int entries, int* shared_bytes, int* blocks) {
  void const* kernel = reinterpret_cast<void const*>(decode_int4_kernel);
  return describe<Configuration>(kernel, kThreads, group, entries, shared_bytes, blocks);
}

extern "C" int launch_decode_int4(DecodeArguments const* a, int shared_bytes, int blocks, cudaStream_t stream) {
  return launch_early(decode_int4_kernel, blocks, kThreads, shared_bytes, stream, *a);
}

}  // namespace kv4rl
