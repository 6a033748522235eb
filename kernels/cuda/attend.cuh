// The attending warps: tiles out of the ring into scores, probabilities and output; merge.cuh finishes an item.
#pragma once
#include "decode.cuh"
#include "softmax.cuh"

namespace kv4rl {

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
      if (work.head < 0) return merge_deferred();
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
    if (arrives()) barrier_arrive(barrier);
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
      if (arrives() && taken.release[k] != kNone) barrier_arrive(taken.release[k]);
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
  uint32_t counted_parity = 0;

  __device__ __forceinline__ int chunk_stride() const { return a.kv_heads * a.group * C::sums; }
  __device__ __forceinline__ float* partials(Item const& work) const;
  __device__ __forceinline__ void write_share();
  __device__ __forceinline__ void merge_warps(Item const& work);
  __device__ __forceinline__ void merge_chunks(Item const& work);
  __device__ __forceinline__ void merge_deferred();
  __device__ __forceinline__ void finish(Item const& work);
};

}  // namespace kv4rl
