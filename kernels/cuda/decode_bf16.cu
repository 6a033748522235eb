// decode_bf16: attention over unquantised 16-bit pages (bf16), for where FlashInfer is absent. One configuration a build,
// as decode_int4.cu; BF16: elements are BF16, else FP16.
#include "launch.cuh"

namespace kv4rl {

using Configuration = Config<PlainFormat<HEAD_DIM, BF16>, HEAD_DIM, QUERY_TILES, WARPS, STAGES, TILES, false>;
constexpr int kThreads = (WARPS + 1) * kWarp;

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    decode_bf16_kernel(__grid_constant__ DecodeArguments const a) {
  decode<Configuration>(a);
}

extern "C" int describe_decode_bf16(int group, int entries, int* shared_bytes, int* blocks) {
  void const* kernel = reinterpret_cast<void const*>(decode_bf16_kernel);
  return describe<Configuration>(kernel, kThreads, group, entries, shared_bytes, blocks);
}

extern "C" int launch_decode_bf16(DecodeArguments const* a, int shared_bytes, int blocks, cudaStream_t stream) {
  return launch_early(decode_bf16_kernel, blocks, kThreads, shared_bytes, stream, *a);
}

}  // namespace kv4rl
