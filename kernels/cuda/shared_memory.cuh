// Loads that stay where they are written, ahead of the arithmetic that needs them: shared memory by 32-bit address, and
// global memory in the order of the calls.
#pragma once
#include <cstdint>

namespace kv4rl {

__device__ __forceinline__ uint32_t shared_address(void const* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 w;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "r"(address));
  return w;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t address) {
  uint2 w;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w.x), "=r"(w.y) : "r"(address));
  return w;
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t address) {
  uint32_t w;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w) : "r"(address));
  return w;
}

__device__ __forceinline__ uint4 load_in_order_16(void const* global) {
  uint4 w;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "l"(global)
               : "memory");
  return w;
}

__device__ __forceinline__ int64_t load_in_order_8(void const* global) {
  int64_t w;
  asm volatile("ld.volatile.global.s64 %0, [%1];" : "=l"(w) : "l"(global) : "memory");
  return w;
}

__device__ __forceinline__ uint16_t load_in_order_2(void const* global) {
  uint16_t w;
  asm volatile("ld.volatile.global.u16 %0, [%1];" : "=h"(w) : "l"(global) : "memory");
  return w;
}

__device__ __forceinline__ int load_in_order_4(void const* global) {
  int w;
  asm volatile("ld.volatile.global.s32 %0, [%1];" : "=r"(w) : "l"(global) : "memory");
  return w;
}

// The lane, kept in a register: recomputed from %tid inside a loop it costs a slow special-register read.
__device__ __forceinline__ int lane_index() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

}  // namespace kv4rl
