// Where the bytes are. kv4rl/formats/packing.py is the definition; kernels/README.md draws it.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

namespace kv4rl {

constexpr int kPageTokens = 16;
constexpr int kWarp = 32;

// A prepared query row: D int8 codes, then {float scale, float code_sum, 8 spare bytes}. The 16-byte tail also keeps
// the rows of a group out of each other's shared-memory banks.
template <int D>
constexpr int kQueryRow = D + 16;

struct QueryTail {
  float scale;     // amax / 127; q_hat = scale * code
  float code_sum;  // sum of the codes, for the affine offset of the keys (Eq. 5.1)
};

// One (page, KV head) chunk: K codes | V codes | per-token metadata.
template <int D>
struct Int4Chunk {
  static constexpr int v_codes = 8 * D, metadata = 16 * D, bytes = 16 * D + 128;
};

template <int D>
struct Int8Chunk {
  static constexpr int v_codes = 16 * D, metadata = 32 * D, bytes = 32 * D + 64;
};

}  // namespace kv4rl
