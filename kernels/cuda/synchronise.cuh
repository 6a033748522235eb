// Barriers: mbarriers by shared-memory address, the attending warps' own, and an arrival seen by the whole device.
#pragma once
#include <cstdint>

namespace kv4rl {

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n"
      "WAIT_%=:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra WAIT_%=;\n}"
      ::"r"(barrier), "r"(parity)
      : "memory");
}

// Whether the phase is over; waits for it up to about `nanoseconds`.
__device__ __forceinline__ bool barrier_over(uint32_t barrier, uint32_t parity, uint32_t nanoseconds) {
  uint32_t done;
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2, %3;\n\t"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity), "r"(nanoseconds)
      : "memory");
  return done;
}

__device__ __forceinline__ bool barrier_over(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// Barriers set up by ordinary stores are used by asynchronous copies next.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A launch that may begin while the one before it ends (launch_early) waits here for that one's results; the launch
// before it lets it begin.
__device__ __forceinline__ void await_previous_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_launch_begin() { asm volatile("griddepcontrol.launch_dependents;"); }

// Among `kThreads` threads of the block, apart from the others.
template <int kThreads>
__device__ __forceinline__ void named_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// One arrival that publishes what this block's threads wrote before its barrier, and shows what others published.
// Returns how many came before.
__device__ __forceinline__ int arrive(int* counter) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// The next ticket, to the lane that takes one; nobody waits for it yet. For atomicAdd the compiler adds up what the lanes
// of a warp ask for and waits at once to hand the answer round.
__device__ __forceinline__ void take(int* counter, bool takes, int& ticket) {
  asm volatile(
      "{\n\t.reg .pred takes;\n\t"
      "setp.ne.s32 takes, %2, 0;\n\t"
      "@takes atom.relaxed.gpu.global.add.s32 %0, [%1], 1;\n}"
      : "+r"(ticket)
      : "l"(counter), "r"(int(takes))
      : "memory");
}

}  // namespace kv4rl
