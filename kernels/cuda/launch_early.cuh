// Launch from the host, allowed to begin while the launch before it is still ending (programmatic dependent launch): the
// kernel calls await_previous_launch() before it touches what that one wrote.
#pragma once
#include <cuda_runtime.h>

namespace kv4rl {

template <class Arguments>
int launch_early(void (*kernel)(Arguments), dim3 blocks, int threads, int shared_bytes, cudaStream_t stream,
                 Arguments const& arguments) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks, config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes, config.stream = stream;
  config.attrs = &early, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

}  // namespace kv4rl
