// F: wait for a post of any lane, then sort its rows by expert. The kernels after it read what it wrote.
#include <cooperative_groups.h>

#include "m2n/kernels.h"
#include "m2n/ptx.cuh"

namespace cg = cooperative_groups;

namespace ffn {
namespace {

constexpr int kThreads = 1024;
constexpr int kBlocks = 8;  // one cluster
constexpr int kKept = 8;    // pairs of a thread that stay in registers
constexpr int kLanesPerThread = kMaxLanes / 32;

// First warp: index of a lane with a new post, or -1 after wait_us, or when *stop is set.
__device__ int wait_for_post(ServiceState* state, const uint32_t* stop, uint32_t wait_us) {
  const int self = threadIdx.x;
  const int num_lanes = state->num_lanes, start = state->next_lane;
  uint64_t expected[kLanesPerThread];
  const uint64_t* flag[kLanesPerThread];
#pragma unroll
  for (int i = 0; i < kLanesPerThread; ++i) {
    const int lane = self + 32 * i;
    expected[i] = lane < num_lanes ? state->lanes[lane].expected : 0;
    flag[i] = expected[i] ? state->lanes[lane].dispatch_flag : nullptr;
  }
  const uint64_t deadline = nanoseconds() + uint64_t{wait_us} * 1000;
  for (uint32_t spin = 0;; ++spin) {
    int best = 1 << 30;  // distance from the lane whose turn it is
#pragma unroll
    for (int i = 0; i < kLanesPerThread; ++i) {
      if (flag[i] && load_acquire_sys(flag[i]) == expected[i]) {
        const int lane = self + 32 * i;
        best = min(best, lane >= start ? lane - start : lane - start + num_lanes);
      }
    }
    best = __reduce_min_sync(0xffffffffu, best);
    if (best < 1 << 30) return (start + best) % num_lanes;
    if ((spin & 63) == 63) {
      const bool over = self == 0 && (load_volatile(stop) != 0 || nanoseconds() > deadline);
      if (__any_sync(0xffffffffu, over)) return -1;
    }
  }
}

// What the first reads after a flag need, kept in shared memory while waiting.
struct LaneHead {
  const int32_t* head;
  const int32_t* ids;
  int32_t capacity;
};

// One thread: the post of lane `index` as the item. All that came from the peer is bounded here.
__device__ void take(ServiceState* state, int index, int layer, int rows, const ServiceShape& shape,
                     const Workspace& work, ServiceCounters* report) {
  ServiceCounters& counters = state->counters;
  Item item = {};
  item.lane = -1;
  if (index >= 0) {
    Lane& lane = state->lanes[index];
    state->next_lane = index + 1 == state->num_lanes ? 0 : index + 1;
    if (layer < 0 || layer >= shape.num_layers || rows < 0 || rows > lane.capacity || rows > shape.item_rows) {
      lane.expected = 0;
      lane.fault = 1;
      report->faults = ++counters.faults;
    } else {
      item.lane = index;
      item.rows = rows;
      item.layer = layer;
      item.weight_row = work.base[layer];
      item.hidden = lane.dispatch_hidden;
      item.weights = lane.dispatch_weights;
      item.out = lane.combine_partial;
      item.out_flag = lane.combine_flag;
      item.flag = lane.expected;
      // Posted stores: reading over PCIe here would cost a microsecond.
      report->taken = ++counters.taken;
    }
  }
  report->waits = ++counters.waits;
  state->item = item;
}

// Rows and tiles of an expert, or of several.
struct Extent {
  int rows, tiles;
};

// Exclusive sum over the block of one extent a thread, and the sum of all; all threads of the block call it.
__device__ Extent block_scan(Extent mine, Extent* warp_sums, Extent* total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Extent sum = mine;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int rows = __shfl_up_sync(0xffffffffu, sum.rows, d), tiles = __shfl_up_sync(0xffffffffu, sum.tiles, d);
    if (lane >= d) sum = {sum.rows + rows, sum.tiles + tiles};
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  Extent theirs = warp_sums[lane];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int rows = __shfl_up_sync(0xffffffffu, theirs.rows, d), tiles = __shfl_up_sync(0xffffffffu, theirs.tiles, d);
    if (lane >= d) theirs = {theirs.rows + rows, theirs.tiles + tiles};
  }
  *total = {__shfl_sync(0xffffffffu, theirs.rows, 31), __shfl_sync(0xffffffffu, theirs.tiles, 31)};
  const int rows = __shfl_sync(0xffffffffu, theirs.rows, (warp + 31) % 32);
  const int tiles = __shfl_sync(0xffffffffu, theirs.tiles, (warp + 31) % 32);
  return {sum.rows - mine.rows + (warp ? rows : 0), sum.tiles - mine.tiles + (warp ? tiles : 0)};
}

// Counts, then places the rows of one item. A small item is sorted by one block, a large one by the whole cluster:
// each block counts its share, and its places begin behind those of the blocks before it.
struct Sorter {
  int count[kMaxExperts];   // this block's, read by the others
  int cursor[kMaxExperts];  // next place of each expert for this block
  Extent warp_sums[32];
  LaneHead heads[kMaxLanes];
  int picked;
};

__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads)
    wait_and_sort(ServiceState* state, ServiceShape shape, Workspace work, const uint32_t* stop,
                  ServiceCounters* report) {
  __shared__ Sorter sorter;
  const cg::cluster_group cluster = cg::this_cluster();
  const int self = threadIdx.x, block = cluster.block_rank();
  sorter.count[self] = 0;
  int picked = -1, layer = 0, sent = 0, rows = 0, early = -1;
  const int32_t* ids = nullptr;
  if (block == 0) {
    if (self < kMaxLanes) {
      const Lane& lane = state->lanes[self];
      sorter.heads[self] = {lane.dispatch_head, lane.dispatch_ids, lane.capacity};
    }
    if (self < 32) {
      const int index = wait_for_post(state, stop, shape.wait_us);
      if (self == 0) sorter.picked = index;
    }
    __syncthreads();
    picked = sorter.picked;
    if (picked >= 0) {
      const LaneHead head = sorter.heads[picked];
      ids = head.ids;
      // Together with the head, before the number of rows is known: one latency instead of two.
      if (self < head.capacity * shape.top_k) early = ids[self];
      layer = *reinterpret_cast<const volatile int32_t*>(head.head);
      sent = *reinterpret_cast<const volatile int32_t*>(head.head + 1);
      const bool fits = layer >= 0 && layer < shape.num_layers && sent >= 0 && sent <= head.capacity;
      rows = fits && sent <= shape.item_rows ? sent : 0;
    }
    if (self == 0) take(state, picked, layer, sent, shape, work, report);
    cluster.barrier_arrive();
  } else {
    cluster.barrier_arrive();
    cluster.barrier_wait();
    picked = state->item.lane;
    rows = state->item.rows;
    if (picked >= 0) {
      ids = state->lanes[picked].dispatch_ids;
      (void)load_acquire_sys(state->lanes[picked].dispatch_flag);
    }
  }
  let_next_kernel_start();
  const int pairs = picked < 0 ? 0 : rows * shape.top_k;
  const int blocks = pairs <= kKept * kThreads ? 1 : kBlocks;
  if (block >= blocks) return;
  if (pairs == 0) {
    cluster.barrier_wait();
    return;
  }
  const int share = (pairs + blocks - 1) / blocks, end = min(pairs, (block + 1) * share);
  const int begin = block * share + self;
  int kept[kKept];  // of the first pairs; more than that are read a second time
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int p = begin + i * kThreads;
    kept[i] = p >= end ? -1 : i == 0 && block == 0 ? early : ids[p];
  }
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    if (kept[i] < 0 || kept[i] >= shape.num_experts) kept[i] = -1;
    if (kept[i] >= 0) atomicAdd(&sorter.count[kept[i]], 1);
  }
  for (int p = begin + kKept * kThreads; p < end; p += kThreads) {
    const int id = ids[p];
    if (id >= 0 && id < shape.num_experts) atomicAdd(&sorter.count[id], 1);
  }
  int count = 0, before = 0;  // of expert `self`: all blocks, the blocks before this one
  if (blocks > 1) {
    if (block == 0) cluster.barrier_wait();
    cluster.sync();
#pragma unroll
    for (int other = 0; other < kBlocks; ++other) {
      const int theirs = cluster.map_shared_rank(sorter.count, other)[self];
      count += theirs;
      before += other < block ? theirs : 0;
    }
    cluster.sync();
  } else {
    __syncthreads();
    count = sorter.count[self];
  }
  const int tiles = (count + kTileRows - 1) / kTileRows;
  Extent total;
  const Extent start = block_scan({count, tiles}, sorter.warp_sums, &total);
  const int num_pairs = total.rows;
  sorter.cursor[self] = start.rows + before;
  const int num_hit = __syncthreads_count(count > 0);
  if (block == 0 && count) {
    // Tiles of one expert are as even as multiples of 8 rows allow.
    const int step = ((count + tiles - 1) / tiles + 7) & ~7;
    for (int i = 0, first = 0; i < tiles; ++i, first += step) {
      work.tiles[start.tiles + i] = {self, start.rows + first, max(0, min(step, count - first)),
                                     static_cast<int16_t>(i), static_cast<int16_t>(tiles)};
      work.tile_done[start.tiles + i] = 0;
    }
  }
  // The peer may write ids between the two passes if it breaks the protocol: places are bounded again.
  for (int first = begin; first < end; first += kKept * kThreads) {
    if (first != begin) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        const int p = first + i * kThreads;
        kept[i] = p < end ? ids[p] : -1;
        if (kept[i] >= shape.num_experts) kept[i] = -1;
      }
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int p = first + i * kThreads;
      const int place = kept[i] >= 0 ? atomicAdd(&sorter.cursor[kept[i]], 1) : -1;
      const bool fits = place >= 0 && place < num_pairs;
      if (p < end) work.place[p] = fits ? place : -1;
      if (fits) work.sorted_token[place] = p / shape.top_k;
    }
  }
  if (block == 0 && self == 0) {
    state->item.tiles = total.tiles;
    state->item.pairs = num_pairs;
    report->rows = state->counters.rows += rows;
    report->pairs = state->counters.pairs += num_pairs;
    report->experts_hit = state->counters.experts_hit += num_hit;
  }
  if (blocks == 1) cluster.barrier_wait();
}

}  // namespace

cudaError_t launch_wait_and_sort(cudaStream_t stream, ServiceState* state, const ServiceShape& shape,
                                 const Workspace& work, const uint32_t* stop, ServiceCounters* report) {
  wait_and_sort<<<kBlocks, kThreads, 0, stream>>>(state, shape, work, stop, report);
  return cudaGetLastError();
}

}  // namespace ffn
