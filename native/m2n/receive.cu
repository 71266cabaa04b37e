// A: wait for the partial rows of every F rank with one warp, then sum them.
#include "m2n/kernels.h"
#include "m2n/ptx.cuh"

namespace ffn {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(32) wait_replies(AttentionStage* stage, const uint32_t* stop, bool early) {
  // The sum of a small batch may already stand by: a block or two on each multiprocessor, doing nothing.
  if (early) let_next_kernel_start();
  const int self = threadIdx.x;
  const uint64_t flag = stage->flag, started = nanoseconds();
  uint32_t status = stage->status;
  for (uint32_t spin = 0; status == 0; ++spin) {
    bool answered = true;
    for (int rank = self; rank < stage->num_links; rank += 32) {
      answered &= load_acquire_sys(stage->links[rank].combine_flag) == flag;
    }
    if (__all_sync(0xffffffffu, answered)) break;
    if ((spin & 63) == 63) {
      if (self == 0) {
        if (load_volatile(stop)) status = 1;
        if (stage->timeout_ns && nanoseconds() - started > stage->timeout_ns) status = 2;
      }
      status = __shfl_sync(0xffffffffu, status, 0);
    }
  }
  if (self == 0 && status) stage->status = status;
  let_next_kernel_start();
}

__global__ void __launch_bounds__(kThreads) sum_partials(AttentionStage* stage, SumCall call) {
  wait_for_previous_kernel();
  const int links = stage->num_links, hidden = call.hidden_size, pieces = hidden / 8;
  const bool failed = stage->status != 0;
  const int64_t total = int64_t{call.rows} * pieces;
  if (threadIdx.x < links && !failed) (void)load_acquire_sys(stage->links[threadIdx.x].combine_flag);
  __syncthreads();
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total; i += int64_t{gridDim.x} * kThreads) {
    const int row = static_cast<int>(i / pieces), piece = static_cast<int>(i % pieces);
    float sum[8] = {};
    for (int rank = 0; rank < links && !failed; ++rank) {
      const int slot = stage->slot[rank * stage->capacity + row];
      if (slot < 0) continue;
      add_bf16x8(sum, load16(stage->links[rank].combine_partial + int64_t{slot} * hidden + piece * 8), 1.f);
    }
    // Nobody may take a missing answer for a result.
    uint4 value = failed ? make_uint4(~0u, ~0u, ~0u, ~0u) : pack_bf16x8(sum);
    store16(call.out + int64_t{row} * hidden + piece * 8, value);
  }
}

}  // namespace

cudaError_t launch_wait_replies(cudaStream_t stream, AttentionStage* stage, const uint32_t* stop, bool early) {
  wait_replies<<<1, 32, 0, stream>>>(stage, stop, early);
  return cudaGetLastError();
}

cudaError_t launch_sum(cudaStream_t stream, int blocks, AttentionStage* stage, const SumCall& call) {
  return launch(sum_partials, blocks, kThreads, 0, stream, true, stage, call);
}

}  // namespace ffn
