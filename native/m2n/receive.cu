// A: wait for the partial rows of every F rank with one warp, then sum them.
#include "m2n/flags.cuh"
#include "m2n/kernels.h"
#include "m2n/ptx.cuh"

namespace ffn {
namespace {

constexpr int kThreads = 256;

constexpr uint64_t kLongWaitNs = 1'000'000;

// One warp: the post outstanding once more, into the windows of the session that the stage has gone over to.
__device__ void dispatch_again(AttentionStage* stage) {
  __shared__ int32_t rows[kMaxServiceRanks];
  const DispatchCall call = stage->pending;
  const int self = threadIdx.x, links = stage->num_links, top_k = call.top_k, pieces = call.hidden_size / 8;
  for (int rank = self; rank < links; rank += 32) rows[rank] = 0;
  __syncwarp();
  for (int row = 0; row < call.rows; ++row) {
    const uint4* source = reinterpret_cast<const uint4*>(call.x + int64_t{row} * call.hidden_size);
    const int id = self < top_k ? call.ids[int64_t{row} * top_k + self] : -1;
    const float weight = self < top_k ? call.weights[int64_t{row} * top_k + self] : 0.f;
    int owner = -1;
    if (id >= 0 && id < stage->num_experts) {
      owner = 0;
      while (owner + 1 < links && stage->links[owner + 1].first_expert <= id) ++owner;
    }
    for (int rank = 0; rank < links; ++rank) {
      const AttentionLink& link = stage->links[rank];
      const bool sent = __any_sync(0xffffffffu, owner == rank);
      const int slot = sent ? rows[rank] : -1;
      __syncwarp();
      if (self == 0) {
        stage->slot[rank * stage->capacity + row] = slot;
        if (sent) rows[rank] = slot + 1;
      }
      __syncwarp();
      if (!sent) continue;
      uint4* target = reinterpret_cast<uint4*>(link.dispatch_hidden + int64_t{slot} * call.hidden_size);
      for (int piece = self; piece < pieces; piece += 32) store16(target + piece, source[piece]);
      if (self < top_k) {
        const int64_t at = int64_t{slot} * top_k + self;
        link.dispatch_ids[at] = owner == rank ? id - link.first_expert : -1;
        link.dispatch_weights[at] = weight;
      }
    }
  }
  fence_sys();
  __syncwarp();
  for (int rank = self; rank < links; rank += 32) {
    stage->links[rank].dispatch_head[0] = call.layer;
    stage->links[rank].dispatch_head[1] = rows[rank];
    store_release_sys(stage->links[rank].dispatch_flag, stage->links[rank].epoch | flag_word(1));
  }
  __syncwarp();
  if (self == 0) stage->sequence = 1;
  __syncwarp();
}

// One warp: go over to the session that the host offers, if there is one; says whether links may have changed. The host
// may be writing the next one.
__device__ bool adopt_offer(AttentionStage* stage) {
  const uint32_t offered = load_volatile(&stage->offered);
  if (offered == 0 || offered == stage->active) return false;
  fence_sys();
  for (int rank = threadIdx.x; rank < stage->num_links; rank += 32) stage->links[rank] = stage->next[rank];
  fence_sys();
  __syncwarp();
  if (load_volatile(&stage->offered) != offered) return true;
  dispatch_again(stage);
  if (threadIdx.x == 0) stage->active = offered;
  __syncwarp();
  return true;
}

// The words that a lane of the warp waits for: read once, since an acquire drops what is cached.
struct Awaited {
  static constexpr int kEach = kMaxServiceRanks / 32;
  const uint64_t* flag[kEach];
  uint64_t word[kEach];

  __device__ explicit Awaited(const AttentionStage* stage) {
    const uint64_t sequence = *reinterpret_cast<const volatile uint64_t*>(&stage->sequence);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int rank = threadIdx.x + 32 * i;
      const AttentionLink& link = stage->links[rank];
      flag[i] = rank < stage->num_links ? link.combine_flag : nullptr;
      word[i] = link.epoch | flag_word(sequence);
    }
  }
  // The first F rank whose answer is missing, or kMaxServiceRanks.
  __device__ int missing() const {
    int rank = kMaxServiceRanks;
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
      if (flag[i] && load_acquire_sys(flag[i]) != word[i]) rank = threadIdx.x + 32 * i;
    }
    return __reduce_min_sync(0xffffffffu, rank);
  }
};

__global__ void __launch_bounds__(32)
    wait_replies(AttentionStage* stage, const uint32_t* control, WaitReport* report, bool early) {
  // The sum of a small batch may already stand by: a block or two on each multiprocessor, doing nothing.
  if (early) let_next_kernel_start();
  const int self = threadIdx.x;
  const uint64_t started = nanoseconds();
  PostTimes times = {stage->posts + 1,     stage->dispatching_ns, stage->dispatched_ns, started, 0, 0,
                     stage->pending.layer, stage->pending.rows};
  Awaited awaited(stage);
  uint32_t status = stage->status;
  bool reported = false;
  for (uint32_t spin = 0; status == 0; ++spin) {
    const int missing = awaited.missing();
    if (missing == kMaxServiceRanks) break;
    if ((spin & 63) != 63) continue;
    uint32_t word = kRun;
    uint64_t waited = 0;
    if (self == 0) {
      word = load_volatile(control);
      waited = nanoseconds() - started;
    }
    word = __shfl_sync(0xffffffffu, word, 0);
    waited = __shfl_sync(0xffffffffu, waited, 0);
    // Nothing of this process may be taken for a result any more: every later call of CUDA fails.
    if (word == kTrap) __trap();
    if (word == kStop) status = 1;
    if (stage->timeout_ns && waited > stage->timeout_ns) status = 2;
    if (adopt_offer(stage)) awaited = Awaited(stage);
    if (waited > kLongWaitNs) {
      reported = true;
      if (self == 0) {
        report->link = missing;
        *reinterpret_cast<volatile uint64_t*>(&report->flag) =
            stage->links[missing].epoch | flag_word(*reinterpret_cast<volatile uint64_t*>(&stage->sequence));
      }
    }
  }
  if (self == 0 && reported) *reinterpret_cast<volatile uint64_t*>(&report->flag) = 0;
  if (self == 0 && status) stage->status = status;
  if (self == 0) {
    times.answered = times.summed = nanoseconds();  // a post without rows has no sum
    stage->times->entry(times.number) = times;
    stage->times->ended = stage->posts = times.number;
  }
  let_next_kernel_start();
}

__global__ void __launch_bounds__(kThreads) sum_partials(AttentionStage* stage, SumCall call) {
  wait_for_previous_kernel();
  const int links = stage->num_links, hidden = call.hidden_size, pieces = hidden / 8;
  const bool failed = stage->status != 0;
  const int64_t total = int64_t{call.rows} * pieces, begin = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  // Of the first piece and rank, beside the flag: one latency instead of two.
  const __nv_bfloat16* const first_partial = stage->links[0].combine_partial;
  const int first_slot = begin < total ? stage->slot[begin / pieces] : -1;
  if (threadIdx.x < links && !failed) (void)load_acquire_sys(stage->links[threadIdx.x].combine_flag);
  __syncthreads();
  for (int64_t i = begin; i < total; i += int64_t{gridDim.x} * kThreads) {
    const int row = static_cast<int>(i / pieces), piece = static_cast<int>(i % pieces);
    float sum[8] = {};
    for (int rank = 0; rank < links && !failed; ++rank) {
      const int slot = rank == 0 && i == begin ? first_slot : stage->slot[rank * stage->capacity + row];
      if (slot < 0) continue;
      const __nv_bfloat16* const partial = rank == 0 ? first_partial : stage->links[rank].combine_partial;
      add_bf16x8(sum, load16(partial + int64_t{slot} * hidden + piece * 8), 1.f);
    }
    // Nobody may take a missing answer for a result.
    uint4 value = failed ? make_uint4(~0u, ~0u, ~0u, ~0u) : pack_bf16x8(sum);
    store16(call.out + int64_t{row} * hidden + piece * 8, value);
  }
  // All blocks have the same share, and this one began last.
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) {
    stage->times->entry(stage->posts).summed = nanoseconds();
  }
}

}  // namespace

cudaError_t launch_wait_replies(cudaStream_t stream, AttentionStage* stage, const uint32_t* control, WaitReport* report,
                                bool early) {
  wait_replies<<<1, 32, 0, stream>>>(stage, control, report, early);
  return cudaGetLastError();
}

cudaError_t launch_sum(cudaStream_t stream, int blocks, AttentionStage* stage, const SumCall& call) {
  return launch(sum_partials, blocks, kThreads, 0, stream, true, stage, call);
}

}  // namespace ffn
