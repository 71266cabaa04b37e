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
  if (item.parts == 0) return;
  if (blockIdx.x == 0 && threadIdx.x == 0) state->item.computed_ns = nanoseconds();
  const int rows = item.rows, hidden = shape.hidden_size, top_k = shape.top_k;
  const int pieces = hidden / 8;
  const int parts = (pieces + kThreads - 1) / kThreads;  // a row is shared by this many turns of a block
  const int busy = min(static_cast<int>(gridDim.x), max(1, rows * parts));
  if (blockIdx.x >= busy) return;
  for (int turn = blockIdx.x; turn < rows * parts; turn += busy) {
    const int row = turn / parts, piece = (turn % parts) * kThreads + threadIdx.x;
    if (piece >= pieces) continue;
    int nth = 0;
    while (nth + 1 < item.parts && row >= item.part[nth + 1].first) ++nth;
    const Part& part = item.part[nth];
    const int own = row - part.first;  // row of the post
    float sum[8] = {};
    for (int k0 = 0; k0 < top_k; k0 += 8) {
      int place[8];
      float weight[8];
      uint4 data[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        place[k] = k0 + k < top_k ? work.place[row * top_k + k0 + k] : -1;
        weight[k] = place[k] >= 0 ? part.weights[own * top_k + k0 + k] : 0.f;
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
    store16(part.out + int64_t{own} * hidden + piece * 8, pack_bf16x8(sum));
  }
  if (is_last_block(&state->combine_arrivals, busy)) {
    if (threadIdx.x < item.parts) {
      const Part& part = item.part[threadIdx.x];
      if (threadIdx.x) fence_sys();  // thread 0 has done so
      store_relaxed_sys(part.out_flag, part.flag);
      state->lanes[part.lane].expected = part.flag + 1;
    }
    if (threadIdx.x == 0) {
      // All loads before the first store, which might alias them: one latency instead of one after the other.
      const ServiceCounters counters = state->counters;
      const uint64_t computed = *reinterpret_cast<volatile uint64_t*>(&state->item.computed_ns);
      const ItemTimes times = {counters.items, item.taken_ns, item.sorted_ns, computed, nanoseconds(),
                               item.layer,     item.rows,     item.parts,     0};
      report->compute_ns = state->counters.compute_ns = counters.compute_ns + computed - times.taken;
      report->send_ns = state->counters.send_ns = counters.send_ns + times.sent - computed;
      report->completed = state->counters.completed = counters.completed + times.parts;
      state->times.entry(times.number) = times;
      state->times.ended = times.number;
    }
  }
}

}  // namespace

cudaError_t launch_combine(cudaStream_t stream, bool overlap, int blocks, ServiceState* state,
                           const ServiceShape& shape, const Workspace& work, ServiceCounters* report) {
  return launch(combine, blocks, kThreads, 0, stream, overlap, state, shape, work, report);
}

}  // namespace ffn
