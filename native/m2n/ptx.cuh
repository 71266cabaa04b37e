// The few PTX instructions that CUDA C++ has no name for: ordering at system scope, barriers, copies, time.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace ffn {

__device__ __forceinline__ uint64_t load_acquire_sys(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_release_sys(uint64_t* p, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Behind a fence of the same thread, this releases what the fence ordered: no second wait for stores over the link.
__device__ __forceinline__ void store_relaxed_sys(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void add_relaxed_sys(uint64_t* p, uint64_t v) {
  asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire_gpu(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void add_release_gpu(uint32_t* p, uint32_t v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t load_volatile(const uint32_t* p) {
  return *reinterpret_cast<const volatile uint32_t*>(p);
}
__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// 16 bytes of window data: never through the non-coherent path, which a peer's stores do not reach.
__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// 16 bytes of local memory that nobody reads again.
__device__ __forceinline__ uint4 load16_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ void store16(void* p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// 8 bytes that are read once, soon: out of the way of what is streamed past them.
__device__ __forceinline__ void store8_once(void* p, uint2 v, uint64_t policy) {
  asm volatile("st.global.L1::no_allocate.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;" ::"l"(p), "r"(v.x), "r"(v.y),
               "l"(policy)
               : "memory");
}

// Programmatic dependent launch; both do nothing in a kernel that was launched without it.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ void add_bf16x8(float (&sum)[8], uint4 v, float scale) {
  const __nv_bfloat162* pair = reinterpret_cast<const __nv_bfloat162*>(&v);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 f = __bfloat1622float2(pair[i]);
    sum[2 * i] = fmaf(f.x, scale, sum[2 * i]);
    sum[2 * i + 1] = fmaf(f.y, scale, sum[2 * i + 1]);
  }
}
__device__ __forceinline__ uint4 pack_bf16x8(const float (&sum)[8]) {
  uint4 v;
  __nv_bfloat162* pair = reinterpret_cast<__nv_bfloat162*>(&v);
#pragma unroll
  for (int i = 0; i < 4; ++i) pair[i] = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
  return v;
}

// Last-block pattern: true in every thread of the block that arrives last. The counter is back at zero for the next
// launch. `release` is called by thread 0 of every block once the block's stores are ordered at system scope; where it
// says that it has not released them, what the last block's thread 0 does next comes after all stores of the grid.
template <typename F>
__device__ __forceinline__ bool is_last_block(uint32_t* counter, uint32_t blocks, F&& release) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_sys();
    const bool released = release();
    last = blocks == 1 || atomicAdd(counter, 1) == blocks - 1;
    if (last && blocks > 1) {
      if (!released) fence_sys();
      *counter = 0;
    }
  }
  __syncthreads();
  return last;
}

}  // namespace ffn
