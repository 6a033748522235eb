// How one request's context becomes units of work. A function of the request's own length and of the cache's format
// alone, never of the batch: so a request's result is the same, bit for bit, in any company and on any grid.
#pragma once
#include <cstdint>

#include "layout.cuh"

namespace kv4rl {

// Side tiles cost two pages each (INT8 against INT4), so a chunk is measured in page weights.
constexpr int kSideWeight = 2;
constexpr int kMaxChunks = 32;  // beyond kMaxChunks * chunk_weight pages, chunks grow instead
// Chunks of so many pages and more belong to caches with many requests: their sizes are graded, below they are equal.
constexpr int kGradedWeight = 128;
constexpr int kGradedChunks = 3;  // the last ones of a request, as 5 : 3 : 1

// Tiles of one request: side tiles (16 entries of the side buffer) first, then main pages.
struct Tiles {
  int side, first_page, pages;  // first_page: where the main region [begin, end) starts
  int begin, end;

  __host__ __device__ int weight() const { return kSideWeight * side + pages; }
  __host__ __device__ int count() const { return side + pages; }
  __host__ __device__ int start_weight(int tile) const {
    return tile < side ? kSideWeight * tile : kSideWeight * side + (tile - side);
  }
};

// kv4rl: sink [0, s) and recent [n - w, n) are side entries, which fill in order (regions.side_entry).
// Other precisions: sink == recent == 0.
__host__ __device__ inline Tiles tiles_of(int context, int sink, int recent) {
  Tiles t;
  int const entries = context < sink + recent ? context : sink + recent;
  t.side = (entries + kPageTokens - 1) / kPageTokens;
  t.begin = context < sink ? context : sink;
  t.end = context - recent > t.begin ? context - recent : t.begin;
  t.first_page = t.begin / kPageTokens;
  t.pages = t.end > t.begin ? (t.end + kPageTokens - 1) / kPageTokens - t.first_page : 0;
  return t;
}

__host__ __device__ inline int chunk_count(Tiles const& t, int chunk_weight) {
  if (t.weight() <= chunk_weight) return 1;
  // Equal chunks of a request that must be split anyway are a little finer: the last blocks then end closer together.
  int const finer = chunk_weight < kGradedWeight ? 3 : 2;
  int const wanted = (finer * t.weight() + 2 * chunk_weight - 1) / (2 * chunk_weight);
  return wanted > kMaxChunks ? kMaxChunks : wanted;
}

// Page weights before chunk i of k. Graded chunks are equal but for the last three, 5/9, 3/9 and 1/9 of what is left
// for them (of two, 3/4 and 1/4): the heaviest run first, and the small ones fill the end of the grid.
__host__ __device__ inline int weight_before(int weight, int i, int k, int chunk_weight) {
  int const graded = k < kGradedChunks ? k : kGradedChunks, rest = k - i;
  if (chunk_weight < kGradedWeight || rest >= graded) return static_cast<int>(int64_t{weight} * i / k);
  return weight - static_cast<int>(int64_t{weight} * rest * rest / (k * graded));
}

// First tile of chunk i of k, up to one tile.
__host__ __device__ inline int chunk_start(Tiles const& t, int i, int k, int chunk_weight) {
  int const weight = weight_before(t.weight(), i, k, chunk_weight);
  int const side_weight = kSideWeight * t.side;
  return weight <= side_weight ? (weight + kSideWeight - 1) / kSideWeight : t.side + weight - side_weight;
}

// One chunk of one request, for every KV head; 32 bytes, read as two 16-byte words.
struct alignas(16) Unit {
  int request, context, slot, first_tile, last_tile;
  int chunk, chunks;
  int partial;  // index of the request's first partial result; -1 if it has one chunk and needs none
};

// Counters of one plan: what plan() wrote, and what a run takes and puts back to zero.
struct Counters {
  int units;     // chunks of all requests
  int next;      // run: work items taken beyond the first of each block
  int finished;  // run: blocks done
  int unused;
};

}  // namespace kv4rl
