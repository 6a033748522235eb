// Decode attention: a persistent grid in which one warp streams cache pages into shared memory and the others attend.
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

namespace kv4rl {

struct DecodeArguments {
  uint8_t const* query;       // [rows, kv_heads * group, kQueryRow<D>]: write_kv's prepared queries
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
  int kv_heads, group, sink, recent, ring_rows, out_type;  // out_type: 0 BF16, 1 FP16, 2 FP32
  float score_scale;                                       // log2(e) / sqrt(D)
};

constexpr int kItemsAhead = 2;  // items whose queries wait in shared memory

struct Item {
  Unit unit;
  int head;  // KV head; -1 ends the work
};

// Shared memory of one block, carved from one allocation; launch.cuh computes the same size.
template <class Format, int D, int N, int W>
struct Shared {
  static constexpr int slot = Format::Chunk::bytes;  // a side tile's 16 rows of D bytes fit too
  static constexpr int query = 8 * N * kQueryRow<D>;
  static constexpr int sums = D + 4;  // floats of one head in `merge`

  uint8_t* ring;      // [rows][W][slot]
  uint8_t* queries;   // [kItemsAhead][8N][kQueryRow]
  float* merge;       // [W][group][sums]
  Item* items;        // [kItemsAhead]
  uint64_t* full;     // [rows]
  uint64_t* empty;    // [rows]
  uint64_t* item_full;   // [kItemsAhead]
  uint64_t* item_empty;  // [kItemsAhead]
  int* is_last;

  static __host__ __device__ int bytes(int rows, int group) {
    return rows * (W * slot + 16) + kItemsAhead * (query + int(sizeof(Item)) + 32) + W * group * sums * 4 + 128 + 128;
  }

  __device__ __forceinline__ Shared(uint8_t* base, int rows, int group) {
    ring = base + (-shared_address(base) & 127);
    queries = ring + rows * W * slot;
    merge = reinterpret_cast<float*>(queries + kItemsAhead * query);
    items = reinterpret_cast<Item*>(merge + W * group * sums);
    full = reinterpret_cast<uint64_t*>(items + kItemsAhead);
    empty = full + rows;
    item_full = empty + rows;
    item_empty = item_full + kItemsAhead;
    is_last = reinterpret_cast<int*>(item_empty + kItemsAhead);
  }
};

// A position in a ring of `size` stages and the parity of its current round.
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int size) {
    if (++stage == size) stage = 0, parity ^= 1;
  }
};

// ---- the streaming warp --------------------------------------------------------------------------------------------

template <class Format, int D, int N, int W, bool kProtected>
struct Producer {
  using Memory = Shared<Format, D, N, W>;
  DecodeArguments const& a;
  Memory const& memory;
  int const lane;
  uint64_t const stream = evict_first_policy();
  Cursor row, item;

  __device__ __forceinline__ void run() {
    int ticket = blockIdx.x;
    int const tickets = a.counters->units * a.kv_heads;
    while (ticket < tickets) {
      Unit const unit = a.units[ticket / a.kv_heads];
      int const head = ticket % a.kv_heads;
      int next = 0;
      if (lane == 0) next = gridDim.x + atomicAdd(&a.counters->next, 1);
      announce(unit, head);
      Tiles const tiles = tiles_of(unit.context, a.sink, a.recent);
      if constexpr (kProtected) send_side(unit, head, min(unit.last_tile, tiles.side));
      int const first = max(unit.first_tile - tiles.side, 0);
      send_pages(unit, head, tiles.first_page + first, max(unit.last_tile - tiles.side, 0) - first);
      ticket = __shfl_sync(~0u, next, 0);
    }
    announce(Unit{}, -1);
    leave();
  }

  __device__ __forceinline__ void announce(Unit const& unit, int head) {
    barrier_wait(&memory.item_empty[item.stage], item.parity ^ 1);
    if (lane == 0) {
      uint64_t* ready = &memory.item_full[item.stage];
      memory.items[item.stage] = Item{unit, head};
      if (head < 0) {
        barrier_arrive(ready);
      } else {
        int const bytes = a.group * kQueryRow<D>;
        barrier_expect(ready, bytes);
        bulk_copy(memory.queries + item.stage * Memory::query,
                  a.query + (int64_t(unit.request) * a.kv_heads + head) * bytes, bytes, ready, stream);
      }
    }
    item.advance(kItemsAhead);
  }

  // One ring stage: lane w < W sends warp w's tile, of `bytes` bytes (0: none).
  __device__ __forceinline__ void send_row(uint8_t const* source, int bytes) {
    barrier_wait(&memory.empty[row.stage], row.parity ^ 1);
    int const all = __reduce_add_sync(~0u, bytes);
    if (lane == 0) barrier_expect(&memory.full[row.stage], all);
    __syncwarp();
    if (bytes > 0)
      bulk_copy(memory.ring + (row.stage * W + lane) * Memory::slot, source, bytes, &memory.full[row.stage], stream);
    row.advance(a.ring_rows);
  }

  __device__ __forceinline__ void send_side(Unit const& unit, int head, int end) {
    int const entries = a.sink + a.recent;
    int64_t const base = (int64_t(unit.slot) * a.kv_heads + head) * entries * D;
    for (int tile = unit.first_tile; tile < end; tile += W) {
      int const mine = tile + lane;
      int const bytes = lane < W && mine < end ? min(kPageTokens, entries - mine * kPageTokens) * D : 0;
      send_row(a.side_k + base + mine * kPageTokens * D, bytes);
      send_row(a.side_v + base + mine * kPageTokens * D, bytes);
    }
  }

  __device__ __forceinline__ void send_pages(Unit const& unit, int head, int first, int count) {
    int64_t const* table = a.page_table + unit.request * a.page_table_stride + first;
    int64_t following = lane < count ? table[lane] : 0;
    for (int i = 0; i < count; i += kWarp) {
      int64_t const ids = following;
      following = i + kWarp + lane < count ? table[i + kWarp + lane] : 0;
      for (int j = 0; j < kWarp && i + j < count; j += W) {
        int64_t const page = __shfl_sync(~0u, ids, (j + lane) % kWarp);
        bool const sends = lane < W && i + j + lane < count;
        send_row(a.pages + (page * a.kv_heads + head) * Format::Chunk::bytes, sends ? Format::Chunk::bytes : 0);
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

template <class Format, int D, int N, int W, bool kProtected>
struct Consumer {
  using Memory = Shared<Format, D, N, W>;
  DecodeArguments const& a;
  Memory const& memory;
  int const lane, warp;
  Cursor row, item;
  QueryCodes<D, N> query;
  float unit_score[N][2];  // query scale * log2(e) / sqrt(D), heads 8n + 2t, + 1
  float code_sum[N][2];    // the same times the sum of the query's codes
  OnlineSoftmax<D, N> softmax;

  __device__ __forceinline__ void run() {
    for (;;) {
      barrier_wait(&memory.item_full[item.stage], item.parity);
      Item const work = memory.items[item.stage];
      if (work.head < 0) return;
      load_query(memory.queries + item.stage * Memory::query);
      __syncwarp();
      if (lane == 0) barrier_arrive(&memory.item_empty[item.stage]);
      item.advance(kItemsAhead);
      softmax.reset();
      Tiles const tiles = tiles_of(work.unit.context, a.sink, a.recent);
      if constexpr (kProtected) attend_side(work, min(work.unit.last_tile, tiles.side));
      attend_pages(work.unit, tiles);
      finish(work);
    }
  }

  __device__ __forceinline__ void load_query(uint8_t const* rows) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      uint8_t const* mine = rows + (8 * n + lane / 4) * kQueryRow<D> + 16 * (lane % 4);
#pragma unroll
      for (int s = 0; s < D / 64; ++s) query.words[n][s] = *reinterpret_cast<uint4 const*>(mine + 64 * s);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint8_t const* tail = rows + (8 * n + 2 * (lane % 4) + h) * kQueryRow<D> + D;
        QueryTail const t = *reinterpret_cast<QueryTail const*>(tail);
        unit_score[n][h] = t.scale * a.score_scale;
        code_sum[n][h] = t.code_sum * unit_score[n][h];
      }
    }
  }

  __device__ __forceinline__ uint8_t const* tile() const {
    return memory.ring + (row.stage * W + warp) * Memory::slot;
  }

  __device__ __forceinline__ void wait_row() { barrier_wait(&memory.full[row.stage], row.parity); }

  __device__ __forceinline__ void release_row() {
    __syncwarp();
    if (lane == 0) barrier_arrive(&memory.empty[row.stage]);
    row.advance(a.ring_rows);
  }

  __device__ __forceinline__ void attend_side(Item const& work, int end) {
    if (work.unit.first_tile >= end) return;
    int const entries = a.sink + a.recent, valid = min(entries, work.unit.context);
    int64_t const base = (int64_t(work.unit.slot) * a.kv_heads + work.head) * entries;
    for (int first = work.unit.first_tile; first < end; first += W) {
      bool const mine = first + warp < end;
      float k_scale[2], v_scale[2];
      bool live[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const entry = (first + warp) * kPageTokens + lane / 4 + 8 * i;
        live[i] = entry < valid;
        k_scale[i] = live[i] ? __half2float(a.side_k_scale[base + entry]) : 0.0f;
        v_scale[i] = live[i] ? __half2float(a.side_v_scale[base + entry]) : 0.0f;
      }
      uint32_t operand[N][2];
      wait_row();
      if (mine) {
        int raw[N][4] = {};
        SideFormat<D>::raw_scores(tile(), lane, query, raw);
        float s[N][4];
        float const none[2] = {0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            s[n][i] = live[i / 2] ? k_scale[i / 2] * (float(raw[n][i]) * unit_score[n][i & 1]) : -INFINITY;
        softmax.template absorb<false>(s, v_scale, none, operand);
      }
      release_row();
      wait_row();
      if (mine) SideFormat<D>::accumulate(tile(), lane, operand, softmax.o);
      release_row();
    }
    softmax.scale_output(Format::low_rows, Format::high_rows);  // to the unit that the main pages add in
  }

  __device__ __forceinline__ void attend_pages(Unit const& unit, Tiles const& tiles) {
    int const first = max(unit.first_tile - tiles.side, 0), count = max(unit.last_tile - tiles.side, 0) - first;
    int position = (tiles.first_page + first + warp) * kPageTokens;
    for (int i = warp; i < count + warp; i += W, position += W * kPageTokens) {
      wait_row();
      if (i < count) attend_page(tile(), position, tiles);
      release_row();
    }
  }

  __device__ __forceinline__ void attend_page(uint8_t const* chunk, int position, Tiles const& tiles) {
    int raw[N][4] = {};
    Format::raw_scores(chunk, lane, query, raw);
    Metadata m = Format::metadata(chunk, lane);
    float s[N][4];
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float const dot = float(raw[n][i]) * (unit_score[n][i & 1] * Format::score_unit);
        s[n][i] = m.k_scale[i / 2] * dot;
        if constexpr (Format::has_offset) s[n][i] = fmaf(m.k_offset[i / 2], code_sum[n][i & 1], s[n][i]);
      }
    if (position < tiles.begin || position + kPageTokens > tiles.end) mask(position, tiles, s, m);
    uint32_t operand[N][2];
    softmax.template absorb<Format::has_offset>(s, m.v_scale, m.v_offset, operand);
    Format::accumulate(chunk, lane, operand, softmax.o);
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

  // Merge the warps' shares, then, if the request has several chunks, the chunks', in their fixed order.
  __device__ __forceinline__ void finish(Item const& work);
};

}  // namespace kv4rl
