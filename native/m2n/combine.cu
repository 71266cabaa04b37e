// F: the weighted sum of each row's experts in f32, straight into the A rank's combine window; then the flag.
#include "m2n/kernels.h"
#include "m2n/ptx.cuh"

namespace ffn {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    combine(ServiceState* state, ServiceShape shape, Workspace work, ServiceCounters* report) {
  wait_for_previous_kernel();
  const Item& item = state->item;
  if (item.lane < 0) return;
  const int rows = item.rows, hidden = shape.hidden_size, top_k = shape.top_k;
  const int pieces = hidden / 8;
  const int parts = (pieces + kThreads - 1) / kThreads;  // a row is shared by this many turns of a block
  const int busy = min(static_cast<int>(gridDim.x), max(1, rows * parts));
  if (blockIdx.x >= busy) return;
  for (int turn = blockIdx.x; turn < rows * parts; turn += busy) {
    const int row = turn / parts, piece = (turn % parts) * kThreads + threadIdx.x;
    if (piece >= pieces) continue;
    float sum[8] = {};
    for (int k0 = 0; k0 < top_k; k0 += 8) {
      int place[8];
      float weight[8];
      uint4 data[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        place[k] = k0 + k < top_k ? work.place[row * top_k + k0 + k] : -1;
        weight[k] = place[k] >= 0 ? item.weights[row * top_k + k0 + k] : 0.f;
      }
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if (place[k] >= 0) data[k] = load16(work.expert_out + int64_t{place[k]} * hidden + piece * 8);
      }
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if (place[k] >= 0) add_bf16x8(sum, data[k], weight[k]);
      }
    }
    store16(item.out + int64_t{row} * hidden + piece * 8, pack_bf16x8(sum));
  }
  if (is_last_block(&state->combine_arrivals, busy) && threadIdx.x == 0) {
    state->lanes[item.lane].expected = item.flag + 1;
    store_release_sys(item.out_flag, item.flag);
    report->completed = ++state->counters.completed;
  }
}

}  // namespace

cudaError_t launch_combine(cudaStream_t stream, bool overlap, int blocks, ServiceState* state,
                           const ServiceShape& shape, const Workspace& work, ServiceCounters* report) {
  return launch(combine, blocks, kThreads, 0, stream, overlap, state, shape, work, report);
}

}  // namespace ffn
