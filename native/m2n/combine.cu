// F: the weighted sum of each row's experts in f32, straight into the A rank's combine window; then the flag.
#include <algorithm>

#include "m2n/flags.cuh"
#include "m2n/kernels.h"
#include "m2n/ptx.cuh"

namespace ffn {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocks = 2;    // on a multiprocessor
constexpr int kFewTurns = 4;  // up to so many for each multiprocessor, one block on it is enough

// A warp sums 32 pieces of 16 bytes of one row at a time.
__global__ void __launch_bounds__(kThreads, kBlocks)
    combine(ServiceState* state, ServiceShape shape, Workspace work, ServiceCounters* report) {
  wait_for_previous_kernel();
  const int self = threadIdx.x & 31, hidden = shape.hidden_size, top_k = shape.top_k;
  const int pieces = hidden / 8, chunks = (pieces + 31) / 32;
  int unit = blockIdx.x * kWarps + threadIdx.x / 32;
  // Lane k holds the place of expert k, asked for one turn ahead; the first time beside the item, before it is known
  // whether there is such a row.
  int place = -1;
  if (self < top_k && unit / chunks < shape.item_rows) place = work.place[unit / chunks * top_k + self];
  const Item& item = state->item;
  if (item.parts == 0) return;
  if (blockIdx.x == 0 && threadIdx.x == 0) state->item.computed_ns = nanoseconds();
  const int units = item.rows * chunks;
  // As few blocks as take no longer: all have the same share, and each one's arrival is waited for.
  const int turns = (units + kWarps - 1) / kWarps, multiprocessors = gridDim.x / kBlocks;
  const int blocks = turns <= kFewTurns * multiprocessors ? multiprocessors : multiprocessors * kBlocks;
  const int each = (turns + blocks - 1) / blocks, busy = turns ? (turns + each - 1) / each : 1;
  if (blockIdx.x >= busy) return;
  uint64_t* const first_flag = item.part[0].out_flag;
  const uint64_t first_word = item.part[0].flag;
  for (int next; unit < units; unit = next) {
    next = unit + busy * kWarps;
    const int row = unit / chunks, piece = unit % chunks * 32 + self;
    int nth = 0;
    while (nth + 1 < item.parts && row >= item.part[nth + 1].first) ++nth;
    const Part& part = item.part[nth];
    const int own = row - part.first;  // row of the post
    const float weight = self < top_k ? part.weights[own * top_k + self] : 0.f;
    int next_place = -1;
    if (self < top_k && next < units) next_place = work.place[next / chunks * top_k + self];
    float sum[8] = {};
    for (int k0 = 0; k0 < top_k; k0 += 8) {
      uint4 data[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int from = __shfl_sync(0xffffffffu, place, k0 + k);
        if (from >= 0 && piece < pieces) data[k] = load16_once(work.expert_out + int64_t{from} * hidden + piece * 8);
      }
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int from = __shfl_sync(0xffffffffu, place, k0 + k);
        const float scale = __shfl_sync(0xffffffffu, weight, k0 + k);
        if (from >= 0 && piece < pieces) add_bf16x8(sum, data[k], scale);
      }
    }
    if (piece < pieces) store16(part.out + int64_t{own} * hidden + piece * 8, pack_bf16x8(sum));
    place = next_place;
  }
  const auto release = [&] {
    bool released = release_share(first_flag, first_word, blockIdx.x, busy);
    for (int i = 1; i < item.parts; ++i) {
      released &= release_share(item.part[i].out_flag, item.part[i].flag, blockIdx.x, busy);
    }
    return released;
  };
  if (is_last_block(&state->combine_arrivals, busy, release)) {
    if (threadIdx.x < item.parts) {
      const Part& part = item.part[threadIdx.x];
      if (busy > 1 && is_first_post(part.flag)) store_release_sys(part.out_flag, part.flag);
      state->lanes[part.lane].expected = part.flag + kPost;
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

cudaError_t launch_combine(cudaStream_t stream, bool overlap, int multiprocessors, ServiceState* state,
                           const ServiceShape& shape, const Workspace& work, ServiceCounters* report) {
  return launch(combine, std::min(kBlocks * multiprocessors, kMaxShares), kThreads, 0, stream, overlap, state, shape,
                work, report);
}

}  // namespace ffn
