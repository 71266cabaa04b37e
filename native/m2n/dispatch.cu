// A: each row goes once to each F rank that owns one of its experts, with 16-byte stores into F's window.
#include "m2n/flags.cuh"
#include "m2n/kernels.h"
#include "m2n/ptx.cuh"

namespace ffn {
namespace {

constexpr int kThreads = 256;
constexpr int kPieces = 4;  // 16-byte pieces that a thread holds at once

// Whether a row has an expert at all.
__device__ __forceinline__ bool has_expert(const int32_t* ids, int top_k, int num_experts) {
  bool any = false;
#pragma unroll 8
  for (int k = 0; k < top_k; ++k) any |= ids[k] >= 0 && ids[k] < num_experts;
  return any;
}

__device__ __forceinline__ void write_head(const AttentionLink& link, int32_t layer, int32_t rows) {
  link.dispatch_head[0] = layer;
  link.dispatch_head[1] = rows;
}

__global__ void __launch_bounds__(kThreads) dispatch(AttentionStage* stage, DispatchCall call) {
  __shared__ AttentionLink link[kMaxServiceRanks];
  __shared__ int32_t slots[kMaxServiceRanks];
  __shared__ int32_t owner[32], local[32];
  const int self = threadIdx.x, top_k = call.top_k, pieces = call.hidden_size / 8;
  const int links = stage->num_links, num_experts = stage->num_experts;
  const uint64_t sequence = flag_word(stage->sequence + 1);
  if (blockIdx.x == 0 && self == 0) stage->dispatching_ns = nanoseconds();
  if (self < kMaxServiceRanks) link[self] = stage->links[self];
  // One F rank and few rows: each block counts the rows before its own instead of asking a shared counter, so that the
  // head goes with the last row instead of after all of them.
  const bool counted = links == 1 && call.rows <= kThreads && call.rows <= gridDim.x;
  for (int row = blockIdx.x; row < call.rows; row += gridDim.x) {
    const uint4* source = reinterpret_cast<const uint4*>(call.x + int64_t{row} * call.hidden_size);
    const int32_t* ids = call.ids + int64_t{row} * top_k;
    uint4 held[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = self + i * kThreads;
      if (piece < pieces) held[i] = __ldg(source + piece);
    }
    const int id = self < top_k ? ids[self] : -1;
    const float weight = self < top_k ? call.weights[int64_t{row} * top_k + self] : 0.f;
    bool earlier = false;
    if (counted && self < row) earlier = has_expert(call.ids + int64_t{self} * top_k, top_k, num_experts);
    const int before = __syncthreads_count(earlier);
    if (self < kMaxServiceRanks) slots[self] = -1;
    __syncthreads();
    if (self < top_k) {
      int rank = -1;
      if (id >= 0 && id < num_experts) {
        rank = 0;
        while (rank + 1 < links && link[rank + 1].first_expert <= id) ++rank;
        slots[rank] = 0;
      }
      owner[self] = rank;
      local[self] = rank >= 0 ? id - link[rank].first_expert : -1;
    }
    __syncthreads();
    if (self < links) {
      int slot = slots[self];
      if (counted) {
        if (row == call.rows - 1) write_head(link[0], call.layer, before + (slot == 0));
        slot = slot == 0 ? before : -1;
      } else if (slot == 0) {
        slot = atomicAdd(&stage->rows[self], 1);
      }
      slots[self] = slot;
      stage->slot[self * stage->capacity + row] = slot;
    }
    __syncthreads();
    for (int rank = 0; rank < links; ++rank) {
      const int slot = slots[rank];
      if (slot < 0) continue;
      uint4* target = reinterpret_cast<uint4*>(link[rank].dispatch_hidden + int64_t{slot} * call.hidden_size);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int piece = self + i * kThreads;
        if (piece < pieces) store16(target + piece, held[i]);
      }
      for (int piece = self + kPieces * kThreads; piece < pieces; piece += kThreads) {
        store16(target + piece, __ldg(source + piece));
      }
      if (self < top_k) {
        const int64_t at = int64_t{slot} * top_k + self;
        link[rank].dispatch_ids[at] = owner[self] == rank ? local[self] : -1;
        link[rank].dispatch_weights[at] = weight;
      }
    }
  }
  if (counted && call.rows == 0 && self == 0) write_head(link[0], call.layer, 0);
  bool released = false;
  const auto release = [&] {
    released = counted && release_share(link[0].dispatch_flag, link[0].epoch | sequence, blockIdx.x, gridDim.x);
    return released;
  };
  if (is_last_block(&stage->arrivals, gridDim.x, release)) {
    if (self < links && !released) {
      if (!counted) {
        volatile int32_t* rows = &stage->rows[self];
        write_head(link[self], call.layer, *rows);
        *rows = 0;
      }
      store_release_sys(link[self].dispatch_flag, link[self].epoch | sequence);
    }
    __syncthreads();
    if (self == 0) {
      stage->sequence += 1;
      stage->pending = call;
      stage->dispatched_ns = nanoseconds();
    }
  }
}

}  // namespace

cudaError_t launch_dispatch(cudaStream_t stream, int blocks, AttentionStage* stage, const DispatchCall& call) {
  dispatch<<<blocks, kThreads, 0, stream>>>(stage, call);
  return cudaGetLastError();
}

}  // namespace ffn
