// write_kv: one launch a layer turns the step's q, k, v into what decode reads: prepared INT8 queries, packed pages, side
// entries. A team of lanes per (token, head) vector: what does not depend on the vector is done once for all teams of a
// warp. Any of q and (k, v) may be absent. One configuration a build: PRECISION; BEFORE, what q and k still need; PAGE_EACH,
// whether no two tokens go to one page, as in a decode step; and as vector.cuh says.
#include "launch_early.cuh"
#include "quantise.cuh"
#include "shared_memory.cuh"
#include "synchronise.cuh"

namespace kv4rl {

enum Precision { kInt4 = 0, kInt8 = 1, kPlain = 2 };  // kPlain: the model's elements, not rotated
enum Before { kNothing = 0, kRope = 1, kNormAndRope = 2 };

struct WriteArguments {
  void const* q;  // [tokens, query_heads, D], heads dense, tokens `q_stride` bytes apart; or null
  void const* k;  // [tokens, kv_heads, D]; or null
  void const* v;
  uint8_t* query;  // [tokens, query_heads, query_row bytes]
  uint8_t* pages;  // this layer's [num_pages, kv_heads, chunk]
  uint8_t* side_k;  // this layer's [slots, kv_heads, entries, D]; null without a side buffer
  uint8_t* side_v;
  __half* side_k_scale;  // [slots, kv_heads, entries]
  __half* side_v_scale;
  int64_t const* page_ids;  // [tokens]; -1: write nothing
  int64_t const* offsets;
  int64_t const* slots;
  int64_t const* side_entries;  // -1: not kept
  void const* q_weight;  // of QK-norm, [D]
  void const* k_weight;
  void const* cosines;  // of RoPE, [tokens, D]
  void const* sines;    // negative in the first half
  unsigned q_stride, k_stride, v_stride, query_row;
  int tokens, query_heads, kv_heads, entries;
  float eps;
};

constexpr int kMostWarps = 8;  // of a block
// Blocks a multiprocessor: 32 registers a thread where they suffice, so that all tokens of a step are resident at once.
constexpr int kBlocks = kEach * kElementBytes == 16 ? 8 : 4;

// What a warp works on: the same heads of one token, a vector a team.
struct Team {
  unsigned token, head, lane;
  bool stores;  // false where there is no such head: it repeats the last one and stores nothing
};

__device__ __forceinline__ Elements load_head(void const* from, unsigned stride, Team const& my) {
  uint8_t const* row = static_cast<uint8_t const*>(from) + uint64_t(my.token) * stride;
  return load_elements(row + my.head * (kD * kElementBytes), my.lane);
}

// A query or key as the cache takes it. Norm and RoPE are computed in FP32 and rounded to the model's type once, at the
// end, as the compiled functions of model/pointwise.py do. All is loaded before anything is used.
__device__ __forceinline__ Elements load_turned(WriteArguments const& a, void const* from, unsigned stride,
                                                void const* weight, Team const& my) {
  Elements const elements = load_head(from, stride, my);
  if constexpr (BEFORE == kNothing) return elements;
  uint64_t const row = uint64_t(my.token) * (kD * kElementBytes);
  Elements const cosines = load_elements(static_cast<uint8_t const*>(a.cosines) + row, my.lane);
  Elements const sines = load_elements(static_cast<uint8_t const*>(a.sines) + row, my.lane);
  Elements const weights = BEFORE == kNormAndRope ? load_elements(weight, my.lane) : elements;
  Vector y = unpack(elements);
  if constexpr (BEFORE == kNormAndRope) normalise(y, weights, a.eps);
  turn(y, cosines, sines);
  return pack(y);
}

// Lane's codes into a dense row of D.
__device__ __forceinline__ void store_row(uint8_t* row, Codes const& codes, unsigned lane) {
  struct alignas(kEach) Row {
    uint32_t word[kEach / 4];
  } mine;
#pragma unroll
  for (int i = 0; i < kEach / 4; ++i) mine.word[i] = codes.word(i);
  reinterpret_cast<Row*>(row)[lane] = mine;
}

__device__ __forceinline__ void write_query(WriteArguments const& a, Team const& my) {
  uint8_t* row = a.query + uint64_t(my.token * a.query_heads + my.head) * a.query_row;
  Elements const elements = load_turned(a, a.q, a.q_stride, a.q_weight, my);
  if constexpr (PRECISION == kPlain) {
    if (my.stores) reinterpret_cast<Elements*>(row)[my.lane] = elements;
  } else {
    Vector y = unpack(elements);
    rotate(y, my.lane);
    float const magnitude = largest(y);
    float const scale = magnitude < INFINITY ? divided_by<127>(magnitude) : magnitude;
    Codes const codes = symmetric<true>(y, scale);
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kEach / 4; ++i) sum = __dp4a(static_cast<int>(codes.word(i)), 0x01010101, sum);
    sum = over_team(sum, [](int a, int b) { return a + b; });
    if (!my.stores) return;
    store_row(row, codes, my.lane);
    if (my.lane == 0) *reinterpret_cast<QueryTail*>(row + kD) = {scale, static_cast<float>(sum)};
  }
}

// Where a token goes, read in one go and before anything that depends on it: under load a read takes a microsecond. The
// low halves of the indices: all fit.
struct Place {
  int page, offset, slot, entry;
};

__device__ __forceinline__ Place read_place(WriteArguments const& a, unsigned token) {
  Place at = {load_in_order_4(a.page_ids + token), load_in_order_4(a.offsets + token), 0, -1};
  if constexpr (PRECISION == kInt4)
    at.slot = load_in_order_4(a.slots + token), at.entry = load_in_order_4(a.side_entries + token);
  return at;
}

__device__ __forceinline__ void store_word(uint8_t* at, uint32_t word) { *reinterpret_cast<uint32_t*>(at) = word; }

// Keys into fragment order (packing.py). Words of 4 channels have index 16s + 4t + 2x + i1; in INT4 those of x = 0 and 1
// share one. A lane's indices begin at kWords * lane, so places of the two parts of an index add up.
__device__ __forceinline__ constexpr unsigned place_of_key(unsigned index) {
  unsigned const i1 = index % 2, x = index / 2 % 2, t = index / 4 % 4, s = index / 16;
  return (PRECISION == kInt8 ? 2 * s + x : s) * 512 + t * 16 + i1 * 8;
}

__device__ __forceinline__ void store_key(uint8_t* chunk, Codes const& codes, unsigned offset, Team const& my) {
  constexpr int kWords = kEach / 4;
  uint8_t* at = chunk + offset % 8 * 64 + offset / 8 * 4;
  if constexpr (PRECISION == kInt4 && kWords == 2) {  // x is the lane's last bit: each of two lanes stores one word
    bool const odd = my.lane % 2;
    uint32_t const words[2] = {codes.word(0), codes.word(1)};
    uint32_t const other = __shfl_xor_sync(~0u, odd ? words[0] : words[1], 1);
    uint32_t const word = odd ? other | words[1] << 4 : words[0] | other << 4;
    if (my.stores) store_word(at + place_of_key(my.lane / 2 * 4 + my.lane % 2), word);
  } else {
    if (!my.stores) return;
    at += place_of_key(my.lane * kWords);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (PRECISION == kInt8) store_word(at + place_of_key(i), codes.word(i));
      if (PRECISION == kInt4 && i % 4 < 2) store_word(at + place_of_key(i), codes.word(i) | codes.word(i + 2) << 4);
    }
  }
}

// Values: a byte of a lane is two channels in INT4, one in INT8; kBytes of them belong to one g.
__device__ __forceinline__ constexpr unsigned place_of_value(unsigned index) {
  constexpr unsigned kBytes = PRECISION == kInt8 ? kD / 8 : kD / 16;
  unsigned const g = index / kBytes, r = index % kBytes;
  if (PRECISION == kInt8) return r / 4 * 512 + g * 64 + r / 2 % 2 * 8 + r % 2 * 2;
  return r / 4 * 512 + g * 64 + r % 4 * 4;
}

// A lane's bytes lie in runs of 16 that the token shares with three others. Where those are not of this launch (PAGE_EACH:
// no two of its tokens go to one page) a run is read and written whole: a byte on its own costs as much as a run.
constexpr int kValueBytes = PRECISION == kInt8 ? kEach : kEach / 2;
constexpr int kRuns = kValueBytes / 4;

// What a lane stores of a value; four bytes a word, each one channel in INT8, two in INT4.
struct ValueBytes {
  uint32_t word[kRuns];

  __device__ __forceinline__ explicit ValueBytes(Codes codes) {
    if constexpr (PRECISION == kInt4)
#pragma unroll
      for (int i = 0; i < kValueBytes; ++i) codes.c[i] = codes.c[2 * i] + codes.c[2 * i + 1] * 16;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) word[i] = codes.word(i);
  }
};

__device__ __forceinline__ uint8_t* run_of_values(uint8_t* chunk, unsigned offset, Team const& my, int run) {
  return chunk + offset / 2 % 4 * 16 + place_of_value(my.lane * kValueBytes) + place_of_value(4 * run);
}

struct Runs {
  uint4 words[kRuns];
};

__device__ __forceinline__ Runs read_runs(uint8_t* chunk, unsigned offset, Team const& my) {
  Runs runs = {};
  if constexpr (PAGE_EACH)
    if (my.stores)
#pragma unroll
      for (int i = 0; i < kRuns; ++i) runs.words[i] = load_in_order_16(run_of_values(chunk, offset, my, i));
  return runs;
}

// Four bytes of a token into its run: INT4, one a word; INT8, two in every other word.
__device__ __forceinline__ uint4 into_run(uint4 run, uint32_t bytes, unsigned hi, unsigned q) {
  if constexpr (PRECISION == kInt8) {
    unsigned const low = q ? 0x5240 : 0x3514, high = q ? 0x7260 : 0x3716, none = 0x3210;
    return {__byte_perm(run.x, bytes, hi ? none : low), __byte_perm(run.y, bytes, hi ? low : none),
            __byte_perm(run.z, bytes, hi ? none : high), __byte_perm(run.w, bytes, hi ? high : none)};
  }
  unsigned const shift = 4 * (2 * q + hi), first = (0x3210 & ~(0xFu << shift)) | 4u << shift, more = 1u << shift;
  return {__byte_perm(run.x, bytes, first), __byte_perm(run.y, bytes, first + more),
          __byte_perm(run.z, bytes, first + 2 * more), __byte_perm(run.w, bytes, first + 3 * more)};
}

__device__ __forceinline__ void store_value(uint8_t* chunk, ValueBytes const& bytes, Runs const& runs, unsigned offset,
                                            Team const& my) {
  if (!my.stores) return;
  unsigned const hi = offset / 8, q = offset % 2;
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    uint8_t* at = run_of_values(chunk, offset, my, i);
    if constexpr (PAGE_EACH) {
      *reinterpret_cast<uint4*>(at) = into_run(runs.words[i], bytes.word[i], hi, q);
    } else {
      at += PRECISION == kInt8 ? hi * 4 + q : q * 2 + hi;
#pragma unroll
      for (int j = 0; j < 4; ++j) at[place_of_value(j)] = static_cast<uint8_t>(bytes.word[i] >> 8 * j);
    }
  }
}

template <bool kValue>
__device__ __forceinline__ void write_side(WriteArguments const& a, Vector const& y, float magnitude, Place const& place,
                                           Team const& my) {
  __half const scale = saturate(divided_by<127>(magnitude));
  if (!my.stores) return;
  int64_t const at = int64_t(place.slot * a.kv_heads + int(my.head)) * a.entries + place.entry;
  store_row((kValue ? a.side_v : a.side_k) + at * kD, symmetric<false>(y, __half2float(scale)), my.lane);
  if (my.lane == 0) (kValue ? a.side_v_scale : a.side_k_scale)[at] = scale;
}

template <bool kValue>
__device__ __forceinline__ void write_quantised(WriteArguments const& a, Vector y, Place const& place, Team const& my) {
  using Chunk = std::conditional_t<PRECISION == kInt8, Int8Chunk<kD>, Int4Chunk<kD>>;
  uint8_t* chunk = a.pages + int64_t(place.page * a.kv_heads + int(my.head)) * Chunk::bytes;
  bool const keeps = PRECISION == kInt4 && place.entry >= 0;
  Codes codes;
  float magnitude;
  if constexpr (PRECISION == kInt8) {
    magnitude = largest(y);
    if (magnitude > kExtreme) bring_within_extremes(y), magnitude = kExtreme;  // rare, and false for NaN
    __half const scale = saturate(divided_by<127>(magnitude));
    codes = symmetric<false>(y, __half2float(scale));
    if (my.lane == 0 && my.stores)
      reinterpret_cast<__half*>(chunk + Chunk::metadata)[2 * place.offset + kValue] = scale;
  } else {
    Range range = range_of(y);
    magnitude = range.magnitude();
    if (magnitude > kExtreme) {
      bring_within_extremes(y), magnitude = kExtreme;
      range = {within_extremes(range.low), within_extremes(range.high)};
    }
    __half2 metadata;
    codes = affine(y, range, metadata);
    if (my.lane == 0 && my.stores)
      reinterpret_cast<__half2*>(chunk + Chunk::metadata)[2 * place.offset + kValue] = metadata;
  }
  if constexpr (kValue) {
    ValueBytes const bytes(codes);
    Runs const runs = read_runs(chunk + Chunk::v_codes, place.offset, my);
    if (keeps) write_side<kValue>(a, y, magnitude, place, my);
    store_value(chunk + Chunk::v_codes, bytes, runs, place.offset, my);
  } else {
    store_key(chunk, codes, place.offset, my);
    if (keeps) write_side<kValue>(a, y, magnitude, place, my);
  }
}

template <bool kValue>
__device__ __forceinline__ void write_key_or_value(WriteArguments const& a, Team my) {
  Place const place = read_place(a, my.token);
  Elements const elements =
      kValue ? load_head(a.v, a.v_stride, my) : load_turned(a, a.k, a.k_stride, a.k_weight, my);
  my.stores = my.stores && place.page >= 0;  // no early exit, which would make the vector wait for the page id
  if constexpr (PRECISION == kPlain) {
    int64_t const rows = (int64_t(place.page * a.kv_heads + int(my.head)) * 2 + kValue) * kPageTokens + place.offset;
    if (my.stores) reinterpret_cast<Elements*>(a.pages + rows * (kD * kElementBytes))[my.lane] = elements;
  } else {
    Vector y = unpack(elements);
    if constexpr (!kValue) rotate(y, my.lane);
    write_quantised<kValue>(a, y, place, my);
  }
}

// Warps of a token, the longest first: those of its keys, then of its values, then of its query heads.
struct WriteLaunch {
  WriteArguments a;
  unsigned query_warps, kv_warps;
};

inline WriteLaunch launch_of(WriteArguments const& a) {
  unsigned const queries = a.q != nullptr ? a.query_heads : 0, keys = a.k != nullptr ? a.kv_heads : 0;
  return {a, (queries + kTeams - 1) / kTeams, (keys + kTeams - 1) / kTeams};
}

inline unsigned blocks_of_token(WriteLaunch const& l) {
  return (l.query_warps + 2 * l.kv_warps + kMostWarps - 1) / kMostWarps;
}

inline int threads_of(WriteLaunch const& l) {  // the token's warps over its blocks
  unsigned const warps = l.query_warps + 2 * l.kv_warps, blocks = blocks_of_token(l);
  return blocks == 0 ? 0 : int((warps + blocks - 1) / blocks) * kWarp;
}

__device__ __forceinline__ Team team_of(unsigned turn, unsigned heads) {
  unsigned const lane = lane_index(), head = kTeams * turn + lane / kTeam;
  return {blockIdx.x, min(head, heads - 1), lane % kTeam, head < heads};
}

extern "C" __global__ void __launch_bounds__(kMostWarps* kWarp, kBlocks)
    write_kv_kernel(__grid_constant__ WriteLaunch const l) {
  WriteArguments const& a = l.a;
  // By a shuffle the compiler sees that a warp does one thing, and checks none of its shuffles for divergence.
  unsigned turn = blockIdx.y * (blockDim.x / kWarp) + __shfl_sync(~0u, threadIdx.x / kWarp, 0);
  let_next_launch_begin();
  await_previous_launch();
  if (turn < l.kv_warps) return write_key_or_value<false>(a, team_of(turn, a.kv_heads));
  turn -= l.kv_warps;
  if (turn < l.kv_warps) return write_key_or_value<true>(a, team_of(turn, a.kv_heads));
  turn -= l.kv_warps;
  if (turn < l.query_warps) write_query(a, team_of(turn, a.query_heads));
}

extern "C" int launch_write_kv(WriteArguments const* a, cudaStream_t stream) {
  WriteLaunch const l = launch_of(*a);
  dim3 const blocks(a->tokens, blocks_of_token(l));
  if (blocks.x == 0 || blocks.y == 0) return cudaSuccess;
  return launch_early(write_kv_kernel, blocks, threads_of(l), 0, stream, l);
}

}  // namespace kv4rl
