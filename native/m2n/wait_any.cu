// F: wait for a post of any lane, then sort its rows by expert. The kernels after it read what it wrote.
#include <cooperative_groups.h>

#include "m2n/flags.cuh"
#include "m2n/kernels.h"
#include "m2n/ptx.cuh"

namespace cg = cooperative_groups;

namespace ffn {
namespace {

constexpr int kThreads = 1024;
constexpr int kBlocks = 8;  // one cluster
constexpr int kKept = 8;    // pairs of a thread that stay in registers
constexpr int kLanesPerThread = kMaxLanes / 32;

constexpr uint64_t kSiblingNs = 8000;

// Posts that go into one item, as far as the sort needs them.
struct Picked {
  int parts, layer, rows;
  int lane[kMaxParts], first[kMaxParts + 1];
  const int32_t* ids[kMaxParts];
};

// First warp: which lanes have a post. Each thread watches every 32nd.
struct Watch {
  uint64_t expected[kLanesPerThread];
  const uint64_t* flag[kLanesPerThread];

  __device__ Watch(const Lane* lanes, int num_lanes) {
#pragma unroll
    for (int i = 0; i < kLanesPerThread; ++i) {
      const int lane = threadIdx.x + 32 * i;
      expected[i] = lane < num_lanes ? lanes[lane].expected : 0;
      flag[i] = expected[i] ? lanes[lane].dispatch_flag : nullptr;
    }
  }
  __device__ bool ready(int i) const { return flag[i] && load_acquire_sys(flag[i]) == expected[i]; }
};

// First warp: index of a lane with a new post, or -1 after wait_us, or when *stop is set.
__device__ int wait_for_post(const Watch& watch, int start, int num_lanes, const uint32_t* stop, uint32_t wait_us) {
  const int self = threadIdx.x;
  const uint64_t deadline = nanoseconds() + uint64_t{wait_us} * 1000;
  for (uint32_t spin = 0;; ++spin) {
    int best = 1 << 30;  // distance from the lane whose turn it is
#pragma unroll
    for (int i = 0; i < kLanesPerThread; ++i) {
      if (watch.ready(i)) {
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

// First warp: ready posts of the same layer join the one of lane `first`. Lanes that have kept step with it (as many
// posts, the last of the same layer: ranks of one instance) are waited for, for as long as their posts lie apart.
__device__ void join(const Watch& watch, const Lane* lanes, int first, int num_lanes, const ServiceShape& shape,
                     Picked* picked) {
  const int self = threadIdx.x;
  const int32_t* const head = lanes[first].dispatch_head;
  const int layer = *reinterpret_cast<const volatile int32_t*>(head);
  int total = *reinterpret_cast<const volatile int32_t*>(head + 1);
  const uint64_t sequence = sequence_of(lanes[first].expected);
  const int last_layer = lanes[first].layer;
  const uint64_t deadline = nanoseconds() + kSiblingNs;
  bool sibling[kLanesPerThread];
#pragma unroll
  for (int i = 0; i < kLanesPerThread; ++i) {
    const int lane = self + 32 * i;
    sibling[i] =
        watch.flag[i] && lane != first && sequence_of(watch.expected[i]) == sequence && lanes[lane].layer == last_layer;
  }
  bool late = true;
  while (late && nanoseconds() < deadline) {
    late = false;
#pragma unroll
    for (int i = 0; i < kLanesPerThread; ++i) late |= sibling[i] && !watch.ready(i);
    late = __any_sync(0xffffffffu, late);
  }
  __syncwarp();
  int parts = 1;
  if (self == 0) picked->first[1] = total;
#pragma unroll
  for (int i = 0; i < kLanesPerThread; ++i) {
    const int lane = self + 32 * i;
    bool joins = lane != first && watch.ready(i);
    int rows = 0;
    if (joins) {
      const int32_t* const theirs = lanes[lane].dispatch_head;
      rows = *reinterpret_cast<const volatile int32_t*>(theirs + 1);
      joins = *reinterpret_cast<const volatile int32_t*>(theirs) == layer && rows >= 0 && rows <= lanes[lane].capacity;
    }
    for (uint32_t all = __ballot_sync(0xffffffffu, joins); all && parts < kMaxParts; all &= all - 1) {
      const int who = __ffs(all) - 1, theirs = __shfl_sync(0xffffffffu, rows, who);
      if (total + theirs > shape.item_rows) continue;
      if (self == who) {
        picked->lane[parts] = lane;
        picked->ids[parts] = lanes[lane].dispatch_ids;
        picked->first[parts + 1] = total + theirs;
      }
      total += theirs;
      ++parts;
    }
  }
  if (self == 0) picked->parts = parts;
  __syncwarp();
}

// One thread: the posts picked as the item. All that came from the peers was bounded before. `lanes` and `counters` are
// what the state held when the wait began; only stores go there now.
__device__ void take(ServiceState* state, const Picked& picked, const Lane* lanes, const ServiceCounters& counters,
                     uint64_t started, ServiceCounters* report) {
  Item& item = state->item;
  item.parts = picked.parts;
  item.rows = picked.rows;
  item.layer = picked.layer;
  item.tiles = item.pairs = 0;
  report->waits = state->counters.waits = counters.waits + 1;
  if (picked.parts == 0) return;
  for (int i = 0; i < picked.parts; ++i) {
    const Lane& lane = lanes[picked.lane[i]];
    Part part = {};
    part.lane = picked.lane[i];
    part.first = picked.first[i];
    part.rows = picked.first[i + 1] - picked.first[i];
    part.ids = lane.dispatch_ids;
    part.weights = lane.dispatch_weights;
    part.hidden = lane.dispatch_hidden;
    part.out = lane.combine_partial;
    part.out_flag = lane.combine_flag;
    part.flag = lane.expected;
    state->lanes[picked.lane[i]].layer = picked.layer;
    item.part[i] = part;
  }
  const uint64_t taken = nanoseconds();
  item.taken_ns = item.sorted_ns = taken;
  // Posted stores: reading over PCIe here would cost a microsecond.
  report->taken = state->counters.taken = counters.taken + picked.parts;
  report->items = state->counters.items = counters.items + 1;
  report->wait_ns = state->counters.wait_ns = counters.wait_ns + taken - started;
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
  Lane lanes[kMaxLanes];  // read before the wait, as the counters are: nothing is left to load when a post comes
  ServiceCounters counters;
  Picked picked;
};

// Pair p of the item: the (row, k) it is, and the expert id that the peer wrote for it.
struct Pairs {
  const Picked& picked;
  const int32_t* first_ids;
  int top_k;

  __device__ int part(int row) const {
    int i = 0;
    while (i + 1 < picked.parts && row >= picked.first[i + 1]) ++i;
    return i;
  }
  __device__ int id(int p) const {
    if (picked.parts == 1) return first_ids[p];
    const int i = part(p / top_k);
    return picked.ids[i][p - picked.first[i] * top_k];
  }
  __device__ int token(int p) const {
    const int row = p / top_k;
    if (picked.parts == 1) return row;
    const int i = part(row);
    return i << kPartShift | (row - picked.first[i]);
  }
};

__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads)
    wait_and_sort(ServiceState* state, ServiceShape shape, Workspace work, const uint32_t* stop,
                  ServiceCounters* report) {
  __shared__ Sorter sorter;
  const cg::cluster_group cluster = cg::this_cluster();
  const int self = threadIdx.x, block = cluster.block_rank();
  Picked& picked = sorter.picked;
  sorter.count[self] = 0;
  int early = -1;
  if (block == 0) {
    const uint64_t started = nanoseconds();
    const int num_lanes = state->num_lanes, start = state->next_lane;
    if (self < num_lanes) sorter.lanes[self] = state->lanes[self];
    if (self == 0) {
      sorter.counters = state->counters;
      picked.parts = 1;
    }
    __syncthreads();
    if (self < 32) {
      const Watch watch(sorter.lanes, num_lanes);
      const int index = wait_for_post(watch, start, num_lanes, stop, shape.wait_us);
      if (self == 0) {
        picked.lane[0] = index;
        picked.first[0] = 0;
        if (index >= 0) picked.ids[0] = sorter.lanes[index].dispatch_ids;
      }
      __syncwarp();
      if (index >= 0 && num_lanes > 1) join(watch, sorter.lanes, index, num_lanes, shape, &picked);
    }
    __syncthreads();
    const int index = picked.lane[0];
    int layer = 0, sent = 0;
    bool fits = false;
    if (index >= 0) {
      const Lane& lane = sorter.lanes[index];
      // Together with the head, before the number of rows is known: one latency instead of two.
      if (self < lane.capacity * shape.top_k) early = lane.dispatch_ids[self];
      layer = *reinterpret_cast<const volatile int32_t*>(lane.dispatch_head);
      sent = *reinterpret_cast<const volatile int32_t*>(lane.dispatch_head + 1);
      fits = layer >= 0 && layer < shape.num_layers && sent >= 0 && sent <= lane.capacity && sent <= shape.item_rows;
      // A peer that changes its head after the flag gains nothing: rows were fixed when others joined.
      if (picked.parts > 1) fits = fits && sent == picked.first[1];
    }
    __syncthreads();
    if (self == 0) {
      if (index >= 0) {
        state->next_lane = index + 1 == num_lanes ? 0 : index + 1;
        if (!fits) {
          state->lanes[index].expected = 0;
          state->lanes[index].fault = 1;
          report->faults = state->counters.faults = sorter.counters.faults + 1;
        }
      }
      if (!fits) picked.parts = 0;
      if (picked.parts == 1) picked.first[1] = sent;
      picked.layer = layer;
      picked.rows = picked.parts ? picked.first[picked.parts] : 0;
      take(state, picked, sorter.lanes, sorter.counters, started, report);
    }
    __syncthreads();
    cluster.barrier_arrive();
  } else {
    cluster.barrier_arrive();
    cluster.barrier_wait();
    const Item& item = state->item;
    if (self < item.parts) {
      picked.ids[self] = item.part[self].ids;
      picked.first[self] = item.part[self].first;
    }
    if (self == 0) {
      picked.parts = item.parts;
      picked.rows = item.rows;
      picked.first[item.parts] = item.rows;
      for (int i = 0; i < item.parts; ++i) (void)load_acquire_sys(state->lanes[item.part[i].lane].dispatch_flag);
    }
    __syncthreads();
  }
  let_next_kernel_start();
  const int weight_row = block == 0 && self == 0 && picked.parts ? work.base[picked.layer] : 0;  // stored at the end
  const int rows = picked.rows, pairs = rows * shape.top_k;
  const int blocks = pairs <= kKept * kThreads ? 1 : kBlocks;
  if (block >= blocks) return;
  if (pairs == 0) {
    cluster.barrier_wait();
    return;
  }
  const Pairs all = {picked, picked.ids[0], shape.top_k};
  const int share = (pairs + blocks - 1) / blocks, end = min(pairs, (block + 1) * share);
  const int begin = block * share + self;
  int kept[kKept];  // of the first pairs; more than that are read a second time
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int p = begin + i * kThreads;
    kept[i] = p >= end ? -1 : i == 0 && block == 0 && picked.parts == 1 ? early : all.id(p);
  }
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    if (kept[i] < 0 || kept[i] >= shape.num_experts) kept[i] = -1;
    if (kept[i] >= 0) atomicAdd(&sorter.count[kept[i]], 1);
  }
  for (int p = begin + kKept * kThreads; p < end; p += kThreads) {
    const int id = all.id(p);
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
        kept[i] = p < end ? all.id(p) : -1;
        if (kept[i] >= shape.num_experts) kept[i] = -1;
      }
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int p = first + i * kThreads;
      const int place = kept[i] >= 0 ? atomicAdd(&sorter.cursor[kept[i]], 1) : -1;
      const bool fits = place >= 0 && place < num_pairs;
      if (p < end) work.place[p] = fits ? place : -1;
      if (fits) work.sorted_token[place] = all.token(p);
    }
  }
  if (block == 0 && self == 0) {
    state->item.tiles = total.tiles;
    state->item.pairs = num_pairs;
    state->item.weight_row = weight_row;
    state->item.sorted_ns = nanoseconds();
    report->rows = state->counters.rows = sorter.counters.rows + rows;
    report->pairs = state->counters.pairs = sorter.counters.pairs + num_pairs;
    report->experts_hit = state->counters.experts_hit = sorter.counters.experts_hit + num_hit;
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
