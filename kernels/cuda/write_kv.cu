// write_kv: one launch a layer turns the step's q, k, v (after RoPE and QK-norm) into what decode reads: prepared INT8
// queries, packed pages, side entries. Half a warp per (token, head) vector: what does not depend on the vector is done once
// for two heads. Any of q and (k, v) may be absent.
// Same formulas, rounding and order of operations as kv4rl/formats: the stored bits are the reference's.
#include <cuda_bf16.h>

#include "launch_early.cuh"
#include "layout.cuh"
#include "shared_memory.cuh"
#include "synchronise.cuh"

namespace kv4rl {

enum Precision { kInt4 = 0, kInt8 = 1, kPlain = 2 };  // kPlain: the model's 16-bit elements, not rotated
enum InputType { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

struct WriteArguments {
  void const* q;  // [tokens, query_heads, D], heads dense, tokens `q_stride` elements apart; or null
  void const* k;  // [tokens, kv_heads, D]; or null
  void const* v;
  int64_t q_stride, k_stride, v_stride;
  uint8_t* query;  // [tokens, query_heads, kQueryRow<D>]
  uint8_t* pages;  // this layer's [num_pages, kv_heads, chunk]
  uint8_t* side_k;  // this layer's [slots, kv_heads, entries, D]; null without a side buffer
  uint8_t* side_v;
  __half* side_k_scale;  // [slots, kv_heads, entries]
  __half* side_v_scale;
  int64_t const* page_ids;  // [tokens]; -1: write nothing
  int64_t const* offsets;
  int64_t const* slots;
  int64_t const* side_entries;  // -1: not kept
  int tokens, query_heads, kv_heads, entries, precision, input_type;
};

constexpr int kD = HEAD_DIM;
constexpr int kTeam = kWarp / 2;   // lanes of one vector
constexpr int kEach = kD / kTeam;  // consecutive channels of a lane
constexpr int kWriteWarps = 4;
constexpr float kFp16Max = 65504.0f;
constexpr float kExtreme = 1e38f;  // keeps high - low finite, as formats/affine.py

struct Vector {
  float x[kEach];
};

struct Codes {
  uint8_t c[kEach];
};

// Which vector a lane works on: one of two heads of a token, both of q, of k or of v.
struct Lane {
  int in_team;
  int head;
  bool stores;  // false where there is no second head: it repeats the first and stores nothing
};

template <class T, class Combine>
__device__ __forceinline__ T over_team(T x, Combine combine) {
#pragma unroll
  for (int lanes = kTeam / 2; lanes > 0; lanes /= 2) x = combine(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}

template <class T>
__device__ __forceinline__ Vector load_as(void const* base, int64_t at, int lane) {
  struct alignas(kEach * sizeof(T) < 16 ? kEach * sizeof(T) : 16) Pack {
    T e[kEach];
  } const pack = *reinterpret_cast<Pack const*>(static_cast<T const*>(base) + at + lane * kEach);
  Vector y;
#pragma unroll
  for (int i = 0; i < kEach; ++i) y.x[i] = static_cast<float>(pack.e[i]);
  return y;
}

__device__ __forceinline__ Vector load_vector(void const* base, int type, int64_t at, int lane) {
  if (type == kBf16) return load_as<__nv_bfloat16>(base, at, lane);
  if (type == kFp16) return load_as<__half>(base, at, lane);
  return load_as<float>(base, at, lane);
}

// x H, largest stride first, as formats/hadamard.py: across lanes, then inside one.
__device__ __forceinline__ void rotate(Vector& y, int lane) {
#pragma unroll
  for (int lanes = kTeam / 2; lanes > 0; lanes /= 2) {
    float const sign = lane & lanes ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) y.x[i] = fmaf(sign, y.x[i], __shfl_xor_sync(~0u, y.x[i], lanes));
  }
#pragma unroll
  for (int half = kEach / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if ((i & half) == 0) {
        float const upper = y.x[i], lower = y.x[i + half];
        y.x[i] = upper + lower;
        y.x[i + half] = upper - lower;
      }
  constexpr float norm = kD == 64 ? 0.125f : kD == 128 ? 0.08838834764831845f : 0.0625f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) y.x[i] *= norm;
}

__device__ __forceinline__ __half saturate(float x) {  // NaN stays NaN
  return x != x ? __ushort_as_half(0x7FFF) : __float2half_rn(fminf(fmaxf(x, -kFp16Max), kFp16Max));
}

// x / step as IEEE division rounds it, for one correctly rounded reciprocal a vector: Markstein's correction step.
struct Divider {
  float step, inverse;
  __device__ __forceinline__ float operator()(float x) const {
    float const near = x * inverse;
    return fmaf(fmaf(-near, step, x), inverse, near);
  }
};

__device__ __forceinline__ Divider divide_by(float step) {  // by zero or NaN: every quotient is 0
  return step > 0.0f ? Divider{step, __frcp_rn(step)} : Divider{0.0f, 0.0f};
}

// x / step rounded half to even into [low, high]; 0 for a zero step or NaN.
__device__ __forceinline__ int code(float quotient, int low, int high) {
  return min(max(__float2int_rn(quotient), low), high);
}

__device__ __forceinline__ Codes symmetric(Vector const& y, float step) {
  Divider const by = divide_by(step);
  Codes codes;
#pragma unroll
  for (int i = 0; i < kEach; ++i) codes.c[i] = static_cast<uint8_t>(code(by(y.x[i]), -127, 127));
  return codes;
}

// The largest magnitude of the vector, NaN if it holds one: magnitudes order as their bits do, NaN above infinity.
__device__ __forceinline__ float largest(Vector const& y) {
  unsigned amax = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) amax = max(amax, __float_as_uint(fabsf(y.x[i])));
  return __uint_as_float(over_team(amax, [](unsigned a, unsigned b) { return max(a, b); }));
}

// Floats as integers of the same order, NaN at the ends; its own inverse.
__device__ __forceinline__ int ordered(int bits) { return bits ^ (bits >> 31 & 0x7FFFFFFF); }

__device__ __forceinline__ Codes affine(Vector const& y, __half2& metadata) {
  int least = 0x7FFFFFFF, most = ~0x7FFFFFFF;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int const x = ordered(__float_as_int(y.x[i]));
    least = min(least, x), most = max(most, x);
  }
  float low = __int_as_float(ordered(over_team(least, [](int a, int b) { return min(a, b); })));
  float high = __int_as_float(ordered(over_team(most, [](int a, int b) { return max(a, b); })));
  bool const nan = low != low || high != high;
  low = nan ? NAN : fminf(fmaxf(low, -kExtreme), kExtreme);
  high = fminf(fmaxf(high, -kExtreme), kExtreme);
  __half const scale = saturate(__fdiv_rn(high - low, 15.0f)), offset = saturate(low);
  metadata = __halves2half2(scale, offset);
  Divider const by = divide_by(__half2float(scale));
  float const from = __half2float(offset);
  Codes codes;
#pragma unroll
  for (int i = 0; i < kEach; ++i) codes.c[i] = static_cast<uint8_t>(code(by(y.x[i] - from), 0, 15));
  return codes;
}

// Lane's kEach bytes to a dense row of D.
__device__ __forceinline__ void store_row(uint8_t* row, Codes const& codes, int lane) {
  struct alignas(kEach) Pack {
    Codes codes;
  };
  *reinterpret_cast<Pack*>(row + lane * kEach) = Pack{codes};
}

// The token's codes into fragment order (packing.py); `row` is the team's shared copy of them.
__device__ __forceinline__ void scatter_k(uint8_t* chunk, uint8_t const* row, int token, int lane, bool int8) {
  uint32_t const* words = reinterpret_cast<uint32_t const*>(row);
  int const g = token % 8, i0 = token / 8;
  for (int i = lane; i < (int8 ? kD / 4 : kD / 8); i += kTeam) {
    int const i1 = i % 2, x = int8 ? i / 2 % 2 : 0, rest = i / (int8 ? 4 : 2), t = rest % 4, s = rest / 4;
    int const first = 16 * s + 4 * t + 2 * x + i1;
    uint32_t const word = int8 ? words[first] : words[first] | words[first + 2] << 4;
    int const block = int8 ? 2 * s + x : s;
    *reinterpret_cast<uint32_t*>(chunk + block * 512 + (4 * g + t) * 16 + i1 * 8 + i0 * 4) = word;
  }
}

__device__ __forceinline__ void scatter_v(uint8_t* codes, uint8_t const* row, int token, int lane, bool int8) {
  int const hi = token / 8, t = token / 2 % 4, q = token % 2;
  for (int i = lane; i < (int8 ? kD : kD / 2); i += kTeam) {
    if (int8) {
      int const g = i / (kD / 8), r = i % (kD / 8);
      codes[r / 4 * 512 + (4 * g + t) * 16 + r / 2 % 2 * 8 + hi * 4 + r % 2 * 2 + q] = row[i];
    } else {
      int const g = i / (kD / 16), j = i % (kD / 16);
      codes[j / 4 * 512 + (4 * g + t) * 16 + j % 4 * 4 + q * 2 + hi] = row[2 * i] | row[2 * i + 1] << 4;
    }
  }
}

__device__ __forceinline__ void copy_row(void* to, void const* from, int bytes, int lane) {
  for (int i = lane; i < bytes / 4; i += kTeam) static_cast<uint32_t*>(to)[i] = static_cast<uint32_t const*>(from)[i];
}

__device__ __forceinline__ void write_query(WriteArguments const& a, int token, Lane const& my) {
  int64_t const from = token * a.q_stride + my.head * kD, to = int64_t(token) * a.query_heads + my.head;
  if (a.precision == kPlain) {  // 16-bit elements as they are (QueryElements)
    if (my.stores)
      copy_row(a.query + to * (2 * kD + 16), static_cast<uint16_t const*>(a.q) + from, 2 * kD, my.in_team);
    return;
  }
  Vector y = load_vector(a.q, a.input_type, from, my.in_team);
  rotate(y, my.in_team);
  float const scale = __fdiv_rn(largest(y), 127.0f);
  Codes const codes = symmetric(y, scale);
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += static_cast<int8_t>(codes.c[i]);
  sum = over_team(sum, [](int a, int b) { return a + b; });
  if (!my.stores) return;
  uint8_t* row = a.query + to * kQueryRow<kD>;
  store_row(row, codes, my.in_team);
  if (my.in_team == 0) *reinterpret_cast<QueryTail*>(row + kD) = {scale, static_cast<float>(sum)};
}

// Where a token goes, read in one go and before anything that depends on it: under load a read takes a microsecond.
struct Place {
  int64_t page;
  int offset, slot, entry;
};

__device__ __forceinline__ int64_t read_now(int64_t const* from, int token) {
  return *static_cast<int64_t const volatile*>(from + token);
}

__device__ __forceinline__ Place read_place(WriteArguments const& a, int token) {
  Place at = {read_now(a.page_ids, token), static_cast<int>(read_now(a.offsets, token)), 0, -1};
  if (a.side_k != nullptr) {
    at.slot = static_cast<int>(read_now(a.slots, token));
    at.entry = static_cast<int>(read_now(a.side_entries, token));
  }
  return at;
}

__device__ __forceinline__ void write_side(WriteArguments const& a, Vector const& y, Place const& place, bool is_v,
                                           Lane const& my) {
  __half const scale = saturate(__fdiv_rn(largest(y), 127.0f));
  if (!my.stores) return;
  int64_t const at = (int64_t(place.slot) * a.kv_heads + my.head) * a.entries + place.entry;
  store_row((is_v ? a.side_v : a.side_k) + at * kD, symmetric(y, __half2float(scale)), my.in_team);
  if (my.in_team == 0) (is_v ? a.side_v_scale : a.side_k_scale)[at] = scale;
}

// A key or value vector into its page, by way of `row` in shared memory.
__device__ __forceinline__ void write_page(WriteArguments const& a, Vector const& y, uint8_t* chunk, uint8_t* row,
                                           int token, bool is_v, Lane const& my) {
  bool const int8 = a.precision == kInt8;
  __half2 metadata;
  if (int8) {
    metadata = __half2half2(saturate(__fdiv_rn(largest(y), 127.0f)));
    store_row(row, symmetric(y, __low2float(metadata)), my.in_team);
  } else {
    store_row(row, affine(y, metadata), my.in_team);
  }
  __syncwarp();
  if (!my.stores) return;
  uint8_t* numbers = chunk + (int8 ? Int8Chunk<kD>::metadata : Int4Chunk<kD>::metadata);
  if (my.in_team == 0 && int8) reinterpret_cast<__half*>(numbers)[2 * token + is_v] = __low2half(metadata);
  if (my.in_team == 0 && !int8) reinterpret_cast<__half2*>(numbers)[2 * token + is_v] = metadata;
  if (is_v)
    scatter_v(chunk + (int8 ? Int8Chunk<kD>::v_codes : Int4Chunk<kD>::v_codes), row, token, my.in_team, int8);
  else
    scatter_k(chunk, row, token, my.in_team, int8);
}

__device__ __forceinline__ void write_plain(WriteArguments const& a, void const* source, int64_t at, int64_t chunk,
                                            int token, bool is_v, int lane) {
  int const size = a.input_type == kFp32 ? 4 : 2;
  uint8_t const* from = static_cast<uint8_t const*>(source) + at * size;
  uint8_t* to = a.pages + (chunk * 2 + is_v) * kPageTokens * kD * size + token * kD * size;
  copy_row(to, from, kD * size, lane);
}

__device__ __forceinline__ void write_key_value(WriteArguments const& a, uint8_t* row, int token, bool is_v,
                                                Lane const& my) {
  Place const place = read_place(a, token);
  void const* source = is_v ? a.v : a.k;
  int64_t const at = token * (is_v ? a.v_stride : a.k_stride) + my.head * kD;
  int64_t const chunk = place.page * a.kv_heads + my.head;
  if (a.precision == kPlain) {
    if (place.page >= 0 && my.stores) write_plain(a, source, at, chunk, place.offset, is_v, my.in_team);
    return;
  }
  Vector y = load_vector(source, a.input_type, at, my.in_team);
  if (place.page < 0) return;
  if (!is_v) rotate(y, my.in_team);
  int const bytes = a.precision == kInt8 ? Int8Chunk<kD>::bytes : Int4Chunk<kD>::bytes;
  write_page(a, y, a.pages + chunk * bytes, row, place.offset, is_v, my);
  if (place.entry >= 0) write_side(a, y, place, is_v, my);
}

__host__ __device__ constexpr int warps_for(int heads) { return (heads + 1) / 2; }

// Warps of a token: those of its query heads first, then of its keys, then of its values.
__host__ __device__ inline int warps_of_token(WriteArguments const& a) {
  return (a.q ? warps_for(a.query_heads) : 0) + (a.k ? 2 * warps_for(a.kv_heads) : 0);
}

inline unsigned blocks_of_token(WriteArguments const& a) { return (warps_of_token(a) + kWriteWarps - 1) / kWriteWarps; }

__device__ __forceinline__ Lane lane_of(int pair, int heads) {
  int const lane = lane_index(), head = 2 * pair + lane / kTeam;
  return {lane % kTeam, min(head, heads - 1), head < heads};
}

extern "C" __global__ void __launch_bounds__(kWriteWarps* kWarp) write_kv_kernel(__grid_constant__ WriteArguments const a) {
  __shared__ alignas(16) uint8_t rows[kWriteWarps][2][kD];
  int const warp = __shfl_sync(~0u, threadIdx.x / kWarp, 0), turn = blockIdx.y * kWriteWarps + warp;
  int const token = blockIdx.x, queries = a.q != nullptr ? warps_for(a.query_heads) : 0, each = warps_for(a.kv_heads);
  let_next_launch_begin();
  await_previous_launch();
  if (turn < queries) return write_query(a, token, lane_of(turn, a.query_heads));
  if (turn >= warps_of_token(a)) return;
  bool const is_v = turn >= queries + each;
  Lane const my = lane_of(turn - queries - (is_v ? each : 0), a.kv_heads);
  write_key_value(a, rows[warp][lane_index() / kTeam], token, is_v, my);
}

extern "C" int launch_write_kv(WriteArguments const* a, cudaStream_t stream) {
  dim3 const blocks(a->tokens, blocks_of_token(*a));
  if (blocks.x == 0 || blocks.y == 0) return cudaSuccess;
  return launch_early(write_kv_kernel, blocks, kWriteWarps * kWarp, 0, stream, *a);
}

}  // namespace kv4rl
