// Decode attention: a persistent grid in which one warp of a block streams cache pages into shared memory and the
// others attend.
//
// A work item is a unit (a chunk of one request, schedule.cuh) and a KV head. Blocks take items from one counter,
// heaviest first. Tiles of 16 tokens go to the W attending warps in turn, one row of W tiles per ring stage, and the
// stream of rows never stops between items: while the warps merge one, the next is already on its way.
#pragma once
#include "bulk_copy.cuh"
#include "formats.cuh"
#include "layout.cuh"
#include "schedule.cuh"
#include "softmax.cuh"
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

// An item whose request's chunks this block may have to merge, once its arrival is known.
struct Deferred {
  Item item;
  alignas(16) int ready;
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
  static constexpr int deferred = item_empty + 8 * kItemsAhead;
  static constexpr int merge = deferred + int(sizeof(Deferred));  // [W][group][sums]

  static __host__ __device__ int scales(int group) { return merge + W * group * sums * 4; }  // [kItemsAhead][entries]
  static __host__ __device__ int scale_bytes(int entries) { return (entries + 15) / 16 * 64; }
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

// What both roles need: arguments, the block's shared memory, the lane.
struct Block {
  DecodeArguments const& a;
  uint8_t* base;
  uint32_t address;  // of base
  int lane;
};

// ---- the streaming warp --------------------------------------------------------------------------------------------

// An item before its turn: what its stream will need is read while the one before it is sent, since under load each
// of these dependent reads takes a microsecond.
struct Upcoming {
  static constexpr int kScales = 8;  // (k_scale, v_scale) pairs of a lane read ahead: 256 side entries
  Item item;                         // head -1: there is none
  Tiles tiles;
  int64_t pages;  // this lane's of the first kWarp page ids
  __half2 scales[kScales];
};

template <class C>
struct Producer : Block {
  static constexpr int kBatch = kWarp / C::W * C::W;  // page ids fetched at once, one a lane
  uint64_t stream;
  int tickets;
  Cursor<C::R> row;
  Cursor<kItemsAhead> item;

  __device__ __forceinline__ void run() {
    stream = evict_first_policy();
    tickets = a.counters->units * a.kv_heads;
    Upcoming now = look_up(blockIdx.x);
    int ticket = take();
    read_ahead(now);
    while (now.item.head >= 0) {
      announce(now);
      Upcoming next = look_up(__shfl_sync(~0u, ticket, 0));
      ticket = take();
      if constexpr (C::kProtected) send_side(now);
      read_ahead(next);
      send_pages(now);
      now = next;
    }
    announce(now);
    leave();
  }

  // The ticket after next, in lane 0; nobody waits for it yet.
  __device__ __forceinline__ int take() {
    return lane == 0 ? int(gridDim.x) + atomicAdd(&a.counters->next, 1) : 0;
  }

  __device__ __forceinline__ Upcoming look_up(int ticket) const {
    Upcoming it;
    it.item.head = -1;
    if (ticket < tickets) it.item = Item{a.units[ticket / a.kv_heads], ticket % a.kv_heads, {}};
    return it;
  }

  __device__ __forceinline__ void read_ahead(Upcoming& it) const {
    if (it.item.head < 0) return;
    Unit const& unit = it.item.unit;
    it.tiles = tiles_of(unit.context, a.sink, a.recent);
    it.pages = lane < min(kBatch, page_count(it)) ? page_ids(it)[lane] : 0;
    if constexpr (C::kProtected)
#pragma unroll
      for (int i = 0; i < Upcoming::kScales; ++i) it.scales[i] = side_scales(it, i * kWarp + lane);
  }

  __device__ __forceinline__ int first_page(Upcoming const& it) const {  // of the main region's
    return max(it.item.unit.first_tile - it.tiles.side, 0);
  }
  __device__ __forceinline__ int page_count(Upcoming const& it) const {
    return max(it.item.unit.last_tile - it.tiles.side, 0) - first_page(it);
  }
  __device__ __forceinline__ int64_t const* page_ids(Upcoming const& it) const {
    return a.page_table + it.item.unit.request * a.page_table_stride + it.tiles.first_page + first_page(it);
  }
  __device__ __forceinline__ int64_t side_row(Upcoming const& it) const {
    return (int64_t(it.item.unit.slot) * a.kv_heads + it.item.head) * (a.sink + a.recent);
  }

  // (k_scale, v_scale) of a side entry, 0 where there is none.
  __device__ __forceinline__ __half2 side_scales(Upcoming const& it, int entry) const {
    int const valid = it.item.unit.first_tile < it.tiles.side ? min(a.sink + a.recent, it.item.unit.context) : 0;
    if (entry >= valid) return __half2half2(__ushort_as_half(0));
    int64_t const at = side_row(it) + entry;
    return __halves2half2(a.side_k_scale[at], a.side_v_scale[at]);
  }

  __device__ __forceinline__ void announce(Upcoming const& it) {
    barrier_wait(address + C::item_empty + 8 * item.stage, item.parity ^ 1);
    if constexpr (C::kProtected)
      if (it.item.head >= 0) store_scales(it);
    uint32_t const ready = address + C::item_full + 8 * item.stage;
    if (lane == 0) {
      reinterpret_cast<Item*>(base + C::items)[item.stage] = it.item;
      if (it.item.head < 0) {
        barrier_arrive(ready);
      } else {
        int const bytes = a.group * C::Query::row;
        barrier_expect(ready, bytes);
        bulk_copy(address + C::queries + item.stage * C::query_bytes,
                  a.query + (int64_t(it.item.unit.request) * a.kv_heads + it.item.head) * bytes, bytes, ready, stream);
      }
    }
    item.advance();
  }

  __device__ __forceinline__ void store_scales(Upcoming const& it) {
    int const bytes = C::scale_bytes(a.sink + a.recent);
    __half2* to = reinterpret_cast<__half2*>(base + C::scales(a.group) + item.stage * bytes);
#pragma unroll
    for (int i = 0; i < Upcoming::kScales; ++i)
      if (i * kWarp + lane < bytes / 4) to[i * kWarp + lane] = it.scales[i];
    for (int i = Upcoming::kScales * kWarp + lane; i < bytes / 4; i += kWarp) to[i] = side_scales(it, i);
    __syncwarp();
  }

  // One ring stage: lane w < W sends warp w's tile, of `bytes` bytes (0: none).
  __device__ __forceinline__ void send_row(uint8_t const* source, int bytes) {
    uint32_t const full = address + C::full + 8 * row.stage;
    barrier_wait(address + C::empty + 8 * row.stage, row.parity ^ 1);
    int const all = __reduce_add_sync(~0u, bytes);
    if (lane == 0) barrier_expect(full, all);
    __syncwarp();
    if (bytes > 0) bulk_copy(address + (row.stage * C::W + lane) * C::slot, source, bytes, full, stream);
    row.advance();
  }

  __device__ __forceinline__ void send_side(Upcoming const& it) {
    int const entries = a.sink + a.recent, end = min(it.item.unit.last_tile, it.tiles.side);
    int64_t const from = side_row(it) * C::D;
    for (int tile = it.item.unit.first_tile; tile < end; tile += C::W) {
      int const mine = tile + lane;
      int const bytes = lane < C::W && mine < end ? min(kPageTokens, entries - mine * kPageTokens) * C::D : 0;
      send_row(a.side_k + from + mine * kPageTokens * C::D, bytes);
      send_row(a.side_v + from + mine * kPageTokens * C::D, bytes);
    }
  }

  __device__ __forceinline__ void send_pages(Upcoming const& it) {
    int const count = page_count(it);
    int64_t const* table = page_ids(it);
    int64_t following = it.pages;
    for (int i = 0; i < count; i += kBatch) {
      int64_t const ids = following;
      following = i + kBatch + lane < count ? table[i + kBatch + lane] : 0;
      for (int j = 0; j < kBatch && i + j < count; j += C::W) {
        int64_t const page = __shfl_sync(~0u, ids, (j + lane) % kWarp);
        bool const sends = lane < C::W && i + j + lane < count;
        send_row(a.pages + (page * a.kv_heads + it.item.head) * C::slot, sends ? C::slot : 0);
      }
    }
  }

  // The last block out puts the counters back, so that the next run (the next layer) starts afresh.
  __device__ __forceinline__ void leave() {
    if (lane != 0) return;
    __threadfence();
    if (atomicAdd(&a.counters->finished, 1) == int(gridDim.x) - 1) a.counters->next = a.counters->finished = 0;
  }
};

// ---- the attending warps -------------------------------------------------------------------------------------------

template <class C>
struct Consumer : Block {
  static constexpr int D = C::D, N = C::N, W = C::W, T = C::T;
  using Format = typename C::Format;
  int warp;
  Cursor<C::R> row;
  Cursor<kItemsAhead> item;
  typename C::Query query;
  OnlineSoftmax<D, N> softmax;

  __device__ __forceinline__ void run() {
    for (;;) {
      barrier_wait(address + C::item_full + 8 * item.stage, item.parity);
      Item const work = reinterpret_cast<Item const*>(base + C::items)[item.stage];
      if (work.head < 0) return finish_all();
      query.load(address + C::queries + item.stage * C::query_bytes, lane, a.score_scale);
      softmax.reset();
      Tiles const tiles = tiles_of(work.unit.context, a.sink, a.recent);
      if constexpr (C::kProtected) attend_side(work.unit, min(work.unit.last_tile, tiles.side));
      release(address + C::item_empty + 8 * item.stage);
      item.advance();
      if constexpr (Format::has_byte_operand) softmax.leave_reference(Format::low_rows, Format::high_rows);
      attend_pages(work.unit, tiles);
      finish(work);
    }
  }

  __device__ __forceinline__ uint32_t slot() const { return address + (row.stage * W + warp) * C::slot; }

  __device__ __forceinline__ void wait_row() { barrier_wait(address + C::full + 8 * row.stage, row.parity); }

  // All lanes are done reading: one of them says so.
  __device__ __forceinline__ void release(uint32_t barrier) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  }

  __device__ __forceinline__ void release_row() {
    release(address + C::empty + 8 * row.stage);
    row.advance();
  }

  __device__ __forceinline__ void attend_side(Unit const& unit, int end) {
    if (unit.first_tile >= end) return;
    int const entries = a.sink + a.recent, valid = min(entries, unit.context);
    uint32_t const scales = address + C::scales(a.group) + item.stage * C::scale_bytes(entries);
    for (int first = unit.first_tile; first < end; first += W) {
      bool const mine = first + warp < end;
      uint32_t operand[1][N][2];
      wait_row();
      if (mine) score_side((first + warp) * kPageTokens + lane / 4, valid, scales, operand);
      release_row();
      wait_row();
      if (mine) SideFormat<D>::accumulate(slot(), lane, operand[0], softmax.o);
      release_row();
    }
    if constexpr (!Format::has_byte_operand)
      softmax.scale_output(Format::low_rows, Format::high_rows);  // to the unit that the main pages add in
  }

  __device__ __forceinline__ void score_side(int entry, int valid, uint32_t scales, uint32_t (&operand)[1][N][2]) {
    Metadata m[1] = {};
    float s[1][N][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float2 const pair = halves(load_shared_4(scales + (entry + 8 * i) * 4));
      m[0].k_scale[i] = pair.x, m[0].v_scale[i] = pair.y;
    }
    SideFormat<D>::scores(slot(), lane, query, m[0].k_scale, s[0]);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[0][n][i] = entry + i / 2 * 8 < valid ? s[0][n][i] : -INFINITY;
    softmax.template absorb<false, false, 1>(s, m, operand);
  }

  // T tiles of this warp, a row of the ring each: where the chunk lies, and the barrier that gives its row back.
  static constexpr uint32_t kNone = ~0u;  // the item has no such tile, or no such row
  struct Taken {
    typename Format::Tile tile[T];
    uint32_t chunk[T], release[T];
    int position[T];

    __device__ __forceinline__ uint32_t source(int k) const { return chunk[k] != kNone ? chunk[k] : chunk[0]; }
  };

  __device__ __forceinline__ void attend_pages(Unit const& unit, Tiles const& tiles) {
    int const first = max(unit.first_tile - tiles.side, 0), count = max(unit.last_tile - tiles.side, 0) - first;
    int position = (tiles.first_page + first + warp) * kPageTokens;
    for (int i = 0; i < count; i += T * W, position += T * W * kPageTokens) {
      Taken taken;
#pragma unroll
      for (int k = 0; k < T; ++k) {
        bool const live = i + k * W + warp < count;
        taken.chunk[k] = live ? slot() : kNone;
        taken.position[k] = live ? position + k * W * kPageTokens : tiles.end;  // at the end: wholly masked
        taken.release[k] = kNone;
        if (k > 0 && i + k * W >= count) continue;  // nor has any warp one
        wait_row();
        taken.release[k] = address + C::empty + 8 * row.stage;
        row.advance();
      }
      if (taken.chunk[0] != kNone) {
        attend_tiles(taken, tiles);
      } else {
        release(taken);
      }
    }
  }

  __device__ __forceinline__ void release(Taken const& taken) {
    __syncwarp();
#pragma unroll
    for (int k = 0; k < T; ++k)
      if (lane == 0 && taken.release[k] != kNone) barrier_arrive(taken.release[k]);
  }

  __device__ __forceinline__ void attend_tiles(Taken& taken, Tiles const& tiles) {
    float s[T][N][4];
    Metadata m[T];
#pragma unroll
    for (int k = 0; k < T; ++k) taken.tile[k].load_keys(taken.source(k), lane);
#pragma unroll
    for (int k = 0; k < T; ++k) {
      m[k] = taken.tile[k].metadata();
      Format::scores(taken.tile[k], query, m[k], s[k]);
    }
#pragma unroll
    for (int k = 0; k < T; ++k) taken.tile[k].load_values(taken.source(k), lane);
    if constexpr (Format::in_registers) release(taken);
    if (taken.position[0] < tiles.begin || taken.position[T - 1] + kPageTokens > tiles.end)  // positions rise
#pragma unroll
      for (int k = 0; k < T; ++k) mask(taken.position[k], tiles, s[k], m[k]);
    if constexpr (Format::has_byte_operand) {
      uint32_t operand[T][N];
      float unit[N][2];
      softmax.template absorb_bytes<Format::has_offset, T>(s, m, operand, unit);
      Format::template accumulate_bytes<N, T>(taken.tile, operand, unit, softmax.o);
    } else {
      uint32_t operand[T][N][2];
      softmax.template absorb<Format::has_offset, Format::has_bf16_operand, T>(s, m, operand);
#pragma unroll
      for (int k = 0; k < T; ++k)
        Format::accumulate(taken.tile[k], operand[k], softmax.o, tiles.end - taken.position[k]);
    }
    if constexpr (!Format::in_registers) release(taken);
  }

  // Outside the main region nothing counts, whatever the page holds there (NaN metadata too).
  __device__ __forceinline__ void mask(int position, Tiles const& tiles, float (&s)[N][4], Metadata& m) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const at = position + lane / 4 + 8 * i;
      if (at >= tiles.begin && at < tiles.end) continue;
      m.v_scale[i] = m.v_offset[i] = 0.0f;
#pragma unroll
      for (int n = 0; n < N; ++n) s[n][2 * i] = s[n][2 * i + 1] = -INFINITY;
    }
  }

  // merge.cuh: the warps' shares of an item, then, if its request has several chunks, the chunks'.
  bool waiting = false;  // the last item was a chunk of several
  int before;            // thread 0: chunks of that request that had arrived before it

  __device__ __forceinline__ int chunk_stride() const { return a.kv_heads * a.group * C::sums; }
  __device__ __forceinline__ float* partials(Item const& work) const;
  __device__ __forceinline__ void write_share();
  __device__ __forceinline__ void merge_warps(Item const& work);
  __device__ __forceinline__ void merge_chunks(Item const& work);
  __device__ __forceinline__ void note_arrival();
  __device__ __forceinline__ void merge_deferred();
  __device__ __forceinline__ void finish(Item const& work);
  __device__ __forceinline__ void finish_all();
};

}  // namespace kv4rl
