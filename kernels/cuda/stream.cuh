// The streaming warp: items off the counter, their queries and pages into shared memory.
#pragma once
#include "bulk_copy.cuh"
#include "decode.cuh"

namespace kv4rl {

// (k_scale, v_scale) of side entries, kCount a lane; FP16, apart until they are stored: a pair would wait for its loads.
struct SideScales {
  static constexpr int kCount = 5, kEntries = kCount * kWarp;
  uint16_t k[kCount], v[kCount];
};

// An item before its turn: what its stream will need is read while the one before it is sent, since under load each
// of these dependent reads takes a microsecond.
struct Upcoming {
  Item item;                         // head -1: there is none
  Tiles tiles;
  int64_t pages;  // this lane's of the first kWarp page ids
  SideScales scales;  // of the first kEntries; wider windows read the rest when it is stored
};

__device__ __forceinline__ __half2 half_pair(uint16_t low, uint16_t high) {
  return __halves2half2(__ushort_as_half(low), __ushort_as_half(high));
}

template <class C>
struct Producer : Block {
  static constexpr int kBatch = kWarp / C::W * C::W;  // page ids fetched at once, one a lane
  // Rows of the item before still to be sent when the next one's ticket is taken, its unit read, its page ids and
  // scales read: far enough apart that nothing waits, and late, so that a block that falls behind takes fewer items.
  static constexpr int kApart = C::kProtected ? 3 : 2;
  uint64_t stream;
  int tickets, asked, rows_left;
  int ticket = 0;  // lane 0's
  int uncounted = 0;  // chunks of several among the items announced whose arrival is still to be counted
  uint32_t written_parity = 0;
  Upcoming next;
  Cursor<C::R> row;
  Cursor<kItemsAhead> item;

  // What neither this layer's launches nor the layer before wrote, the plan and the page table, is read while the launch
  // before this one ends; past the first-level cache, which that launch filled.
  __device__ __forceinline__ void prepare() {
    stream = evict_first_policy();
    tickets = load_in_order_4(&a.counters->units) * a.kv_heads;
    next = look_up(blockIdx.x);
    read_pages(next);
  }

  __device__ __forceinline__ void run() {
    read_scales(next);
    Upcoming now = next;
    while (now.item.head >= 0) {
      announce(now);
      asked = 0;
      rows_left = row_count(now);
      if constexpr (C::kProtected) send_side(now);
      send_pages(now);
      look_ahead();
      now = next;
    }
    announce(now);
    while (uncounted > 0) {
      barrier_wait(address + C::written, written_parity);
      count_arrival();
    }
    leave();
  }

  // Count in a chunk that the attending warps have written, if they have: here, where the fence that publishes it for
  // other blocks holds up nothing.
  __device__ __forceinline__ void count_arrival() {
    if (uncounted == 0 || __any_sync(~0u, !barrier_over(address + C::written, written_parity))) return;
    written_parity ^= 1;
    --uncounted;
    if (lane == 0) {
      Deferred* deferred = reinterpret_cast<Deferred*>(base + C::deferred);
      Unit const& unit = deferred->item.unit;
      int const before = arrive(a.arrivals + int64_t(unit.request) * a.kv_heads + deferred->item.head);
      deferred->last = before == unit.chunks - 1;
      barrier_arrive(address + C::counted);
    }
    __syncwarp();
  }

  // Waits for the attending warps, which may be waiting for a count themselves.
  __device__ __forceinline__ void wait_counting(uint32_t barrier, uint32_t parity) {
    constexpr uint32_t kNanoseconds = 500;
    if (uncounted == 0) return barrier_wait(barrier, parity);
    while (__any_sync(~0u, !barrier_over(barrier, parity, kNanoseconds))) count_arrival();
  }

  __device__ __forceinline__ void look_ahead() {
    if (asked == 0 && rows_left <= 3 * kApart) take(&a.counters->next, lane == 0, ticket), asked = 1;
    if (asked == 1 && rows_left <= 2 * kApart) next = look_up(int(gridDim.x) + __shfl_sync(~0u, ticket, 0)), asked = 2;
    if (asked == 2 && rows_left <= kApart) read_ahead(next), asked = 3;
  }

  __device__ __forceinline__ Upcoming look_up(int ticket) const {
    Upcoming it;
    it.item.head = -1;
    if (ticket >= tickets) return it;
    Unit const* const unit = a.units + ticket / a.kv_heads;
    uint4 const words[2] = {load_in_order_16(unit), load_in_order_16(reinterpret_cast<uint4 const*>(unit) + 1)};
    it.item.head = ticket % a.kv_heads;
    memcpy(&it.item.unit, words, sizeof(Unit));
    return it;
  }

  __device__ __forceinline__ void read_ahead(Upcoming& it) const {
    read_pages(it);
    read_scales(it);
  }

  __device__ __forceinline__ void read_pages(Upcoming& it) const {
    if (it.item.head < 0) return;
    Unit const& unit = it.item.unit;
    it.tiles = tiles_of(unit.context, a.sink, a.recent);
    it.pages = lane < min(kBatch, page_count(it)) ? load_in_order_8(page_ids(it) + lane) : 0;
  }

  __device__ __forceinline__ void read_scales(Upcoming& it) const {
    if constexpr (C::kProtected)
      if (it.item.head >= 0 && side_valid(it) > 0) it.scales = side_scales(it, 0);
  }

  __device__ __forceinline__ int first_page(Upcoming const& it) const {  // of the main region's
    return max(it.item.unit.first_tile - it.tiles.side, 0);
  }
  __device__ __forceinline__ int page_count(Upcoming const& it) const {
    return max(it.item.unit.last_tile - it.tiles.side, 0) - first_page(it);
  }
  __device__ __forceinline__ int row_count(Upcoming const& it) const {
    int const side = max(min(it.item.unit.last_tile, it.tiles.side) - it.item.unit.first_tile, 0);
    return 2 * ((side + C::W - 1) / C::W) + (page_count(it) + C::W - 1) / C::W;
  }
  __device__ __forceinline__ int64_t const* page_ids(Upcoming const& it) const {
    return a.page_table + it.item.unit.request * a.page_table_stride + it.tiles.first_page + first_page(it);
  }
  __device__ __forceinline__ int64_t side_row(Upcoming const& it) const {
    return (int64_t(it.item.unit.slot) * a.kv_heads + it.item.head) * (a.sink + a.recent);
  }

  __device__ __forceinline__ int side_valid(Upcoming const& it) const {
    return it.item.unit.first_tile < it.tiles.side ? min(a.sink + a.recent, it.item.unit.context) : 0;
  }

  // Of entries `first`, `first + 1`, ... over the lanes; those beyond the last are the last's. All loads are on their way
  // before the first is waited for: each under a condition of its own, they would wait in turn.
  __device__ __forceinline__ SideScales side_scales(Upcoming const& it, int first) const {
    SideScales scales;
    int64_t const row = side_row(it);
    int const last = side_valid(it) - 1;
#pragma unroll
    for (int i = 0; i < SideScales::kCount; ++i) {
      int64_t const at = row + min(first + i * kWarp + lane, last);
      scales.k[i] = load_in_order_2(a.side_k_scale + at), scales.v[i] = load_in_order_2(a.side_v_scale + at);
    }
    return scales;
  }

  __device__ __forceinline__ void announce(Upcoming const& it) {
    wait_counting(address + C::item_empty + 8 * item.stage, item.parity ^ 1);
    uncounted += it.item.head >= 0 && it.item.unit.chunks > 1;
    if constexpr (C::kProtected)
      if (it.item.head >= 0) store_scales(it);
    uint32_t const ready = address + C::item_full + 8 * item.stage;
    if (lane != 0) {
      if (arrives()) barrier_arrive(ready);
    } else {
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
    int const count = C::scale_bytes(a.sink + a.recent) / 4, valid = side_valid(it);
    __half2* to = reinterpret_cast<__half2*>(base + C::scales(a.group)) + item.stage * count;
    SideScales scales = it.scales;
    for (int first = 0; first < count; first += SideScales::kEntries) {
      if (0 < first && first < valid) scales = side_scales(it, first);
#pragma unroll
      for (int i = 0; i < SideScales::kCount; ++i) {
        int const entry = first + i * kWarp + lane;  // zero where there is none
        if (entry < count) to[entry] = half_pair(entry < valid ? scales.k[i] : 0, entry < valid ? scales.v[i] : 0);
      }
    }
    __syncwarp();
  }

  // One ring stage: lane w < W sends warp w's tile, of `bytes` bytes (0: none).
  __device__ __forceinline__ void send_row(uint8_t const* source, int bytes) {
    look_ahead();
    count_arrival();
    --rows_left;
    uint32_t const full = address + C::full + 8 * row.stage;
    wait_counting(address + C::empty + 8 * row.stage, row.parity ^ 1);
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

}  // namespace kv4rl
