// Decode attention: a persistent grid in which one warp of a block streams cache pages into shared memory and the
// others attend.
//
// A work item is a unit (a chunk of one request, schedule.cuh) and a KV head. Blocks take items from one counter,
// heaviest first. Tiles of 16 tokens go to the W attending warps in turn, one row of W tiles per ring stage, and the
// stream of rows never stops between items: while the warps merge one, the next is already on its way.
#pragma once
#include "formats.cuh"
#include "layout.cuh"
#include "schedule.cuh"
#include "synchronise.cuh"

namespace kv4rl {

struct DecodeArguments {
  uint8_t const* query;       // [rows, kv_heads * group, Query::row]: write_kv's prepared queries
  uint8_t const* pages;       // this layer's [num_pages, kv_heads, chunk bytes]
  int64_t const* page_table;  // [rows, page_table_stride]
  uint8_t const* side_k;      // this layer's [slots, kv_heads, sink + recent, D] INT8; keys rotated
  uint8_t const* side_v;
  __half const* side_k_scale;  // [slots, kv_heads, sink + recent]
  __half const* side_v_scale;
  void* out;   // [rows, kv_heads * group, D] of out_type
  float* lse;  // [rows, kv_heads * group], natural log; or null
  Unit const* units;
  Counters* counters;
  float* partial;  // [partials, kv_heads, group, D + 4]: D sums, top (log2), total
  int* arrivals;   // [rows, kv_heads], zero between runs
  int64_t page_table_stride;
  int kv_heads, group, sink, recent, out_type;  // out_type: 0 BF16, 1 FP16, 2 FP32
  float score_scale;                            // log2(e) / sqrt(D)
};

constexpr int kItemsAhead = 2;  // items whose queries wait in shared memory

struct alignas(16) Item {
  Unit unit;
  int head;      // KV head; -1 ends the work
  int spare[3];  // whole 16-byte words copy faster
};

// A chunk of several whose arrival is being counted, after which this block may have to merge the request's chunks.
struct Deferred {
  Item item;
  alignas(16) int last;  // all the others had arrived before it
};

// What a build fixes: format, head_dim, query tiles of 8 heads, attending warps, ring stages, tiles a warp takes at
// once, and whether sink and recent positions lie in the side buffer.
template <class Format_, int D_, int N_, int W_, int R_, int T_, bool kProtected_>
struct Config {
  using Format = Format_;
  using Query = typename Format::template Query<N_>;
  static constexpr int D = D_, N = N_, W = W_, R = R_, T = T_;
  static constexpr bool kProtected = kProtected_;
  static constexpr int slot = Format::Chunk::bytes;  // 16 side rows of D bytes fit too
  static constexpr int sums = D + 4;                 // floats a head in `merge`: D sums, top, total

  // Offsets in shared memory.
  static constexpr int queries = R * W * slot;  // [kItemsAhead][8N][Query::row]
  static constexpr int query_bytes = 8 * N * Query::row;
  static constexpr int items = queries + kItemsAhead * query_bytes;  // [kItemsAhead]
  static constexpr int full = items + kItemsAhead * int(sizeof(Item));
  static constexpr int empty = full + 8 * R;
  static constexpr int item_full = empty + 8 * R;
  static constexpr int item_empty = item_full + 8 * kItemsAhead;
  static constexpr int written = item_empty + 8 * kItemsAhead;  // the chunk in `deferred` is in memory
  static constexpr int counted = written + 8;                   // and its arrival is known
  static constexpr int deferred = counted + 8;
  static constexpr int merge = deferred + int(sizeof(Deferred));  // [W][group][sums]

  static __host__ __device__ int scales(int group) { return merge + W * group * sums * 4; }  // [kItemsAhead][entries]
  static __host__ __device__ int scale_bytes(int entries) { return (entries + 15 & -16) * 4; }
  static __host__ __device__ int bytes(int group, int entries) {
    return scales(group) + kItemsAhead * scale_bytes(entries) + 128;
  }
};

// A position in a ring of `kSize` stages and the parity of its current round.
template <int kSize>
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kSize) stage = 0, parity ^= 1;
  }
};

// Lanes of a warp that arrive at a barrier once all are done reading or writing. One is enough; in builds for racecheck,
// which does not see that __syncwarp orders the other lanes' accesses before lane 0's arrival, each speaks for itself.
#ifdef EVERY_LANE_ARRIVES
constexpr int kArrivingLanes = kWarp;
#else
constexpr int kArrivingLanes = 1;
#endif

// What both roles need: arguments, the block's shared memory, the lane.
struct Block {
  DecodeArguments const& a;
  uint8_t* base;
  uint32_t address;  // of base
  int lane;

  __device__ __forceinline__ bool arrives() const { return kArrivingLanes == kWarp || lane == 0; }
};

}  // namespace kv4rl
