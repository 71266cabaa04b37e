// Both products of the routed experts in one persistent kernel, for one row or thousands.
//
// The weights are the left operand: a tile is 256 weight rows (4 x m64) by up to 192 token rows (n16 ... n192), so few
// tokens cost few matrix cycles and every byte of weights is read once. Weights come by tensor copies, tokens by
// 16-byte gathers. The rows of both matrices lie in the order of ffn_faas/experts/gpu_layout.py: a thread then holds
// the gate and the up value of the same columns, and its results lie side by side in memory. Down tiles follow gate_up
// tiles in one list; a down tile waits for the gate_up tiles of its rows, its weights do not.
//
// Warps: 2 x 4 multiply, then one loads weights, three gather tokens.
#include "experts_gpu/experts.h"
#include "experts_gpu/pipeline.cuh"
#include "experts_gpu/wgmma.cuh"
#include "m2n/kernels.h"
#include "m2n/ptx.cuh"

namespace ffn {
namespace {

constexpr int kThreads = 384;
constexpr int kConsumerWarps = 8;
constexpr int kWeightRows = 256;
constexpr int kGatherWarps = 3;
constexpr int kDepth = 64;  // elements of the inner dimension a stage holds: 128 bytes
constexpr int kStages = 4;
constexpr int kWeightBytes = kWeightRows * kDepth * 2;
constexpr int kTokenBytes = kTileRows * kDepth * 2;
constexpr int kStageBytes = kWeightBytes + kTokenBytes;
constexpr int kJobBytes = 32;
constexpr int kSharedBytes = 1024 + kStages * (kStageBytes + 16 + kJobBytes) + kTileRows * 8;

// One tile of the list: gate_up tiles of all row tiles, then the down tiles.
struct Job {
  int row_tile, block;  // block of kWeightRows weight rows
  int down;
  RowTile rows;
};
static_assert(sizeof(Job) <= kJobBytes, "a job is handed over in shared memory");

struct Shared {
  uint32_t stages, full, empty;
  Job* jobs;          // of the stage that begins it
  uint64_t* sources;  // address of each token row of the gather's tile

  __device__ explicit Shared(uint8_t* raw) {
    stages = (shared_address(raw) + 1023) & ~1023u;
    full = stages + kStages * kStageBytes;
    empty = full + kStages * 8;
    uint8_t* rest = raw + (empty + kStages * 8 - shared_address(raw));
    jobs = reinterpret_cast<Job*>(rest);
    sources = reinterpret_cast<uint64_t*>(rest + kStages * kJobBytes);
  }
  __device__ uint32_t weights(int stage) const { return stages + stage * kStageBytes; }
  __device__ uint32_t tokens(int stage) const { return stages + stage * kStageBytes + kWeightBytes; }
  __device__ uint32_t full_barrier(int stage) const { return full + stage * 8; }
  __device__ uint32_t empty_barrier(int stage) const { return empty + stage * 8; }
  __device__ Job& job(int stage) const {
    return *reinterpret_cast<Job*>(reinterpret_cast<uint8_t*>(jobs) + stage * kJobBytes);
  }
};

struct Place {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct JobList {
  const RowTile* tiles;
  int gate_up_blocks, down_blocks, gate_up_jobs, jobs;
  int last;   // gate_up jobs of the last, partial round, if they are few: else 0
  int ahead;  // down jobs that every other block does meanwhile

  __device__ JobList(const Item& item, const ServiceShape& shape, const Workspace& work) : tiles(work.tiles) {
    gate_up_blocks = (2 * shape.intermediate_size + kWeightRows - 1) / kWeightRows;
    down_blocks = (shape.hidden_size + kWeightRows - 1) / kWeightRows;
    gate_up_jobs = item.tiles * gate_up_blocks;
    jobs = gate_up_jobs + item.tiles * down_blocks;
    const int blocks = gridDim.x;
    last = gate_up_jobs % blocks;
    ahead = min((shape.hidden_size + shape.intermediate_size / 2) / shape.intermediate_size,
                (jobs - gate_up_jobs) / (blocks - last));
    if (gate_up_jobs < blocks || 2 * last > blocks || ahead == 0) last = 0;
  }
  // The n-th job of this block, past the end for none. Rounds of the list, but where few blocks have one more of the
  // long gate_up jobs, all others take down jobs meanwhile.
  __device__ int turn(int n) const {
    const int blocks = gridDim.x, self = blockIdx.x, plain = n * blocks + self;
    if (last == 0 || plain < gate_up_jobs) return plain;
    const int others = blocks - last, own = n - gate_up_jobs / blocks;
    if (self >= last && own < ahead) return gate_up_jobs + own * others + self - last;
    return gate_up_jobs + ahead * others + (self < last ? own - 1 : own - ahead) * blocks + self;
  }
  // Asked for one turn ahead, so that nobody waits for its loads; past the end it is nothing.
  __device__ Job at(int index) const {
    Job job = {};
    if (index >= jobs) return job;
    job.down = index >= gate_up_jobs;
    const int i = job.down ? index - gate_up_jobs : index;
    const int blocks = job.down ? down_blocks : gate_up_blocks;
    job.row_tile = i / blocks;
    job.block = i % blocks;
    job.rows = tiles[job.row_tile];
    if (job.rows.count > 1) {
      // Tiles that share weights come one after another, so that they read them at the same time.
      const int first = job.row_tile - job.rows.index, local = i - first * blocks;
      job.row_tile = first + local % job.rows.count;
      job.block = local / job.rows.count;
      job.rows = tiles[job.row_tile];
    }
    return job;
  }
};

__device__ void load_weights(const Shared& shared, const JobList& list, const ExpertWeights& weights,
                             const ServiceShape& shape, int weight_row) {
  Place place;
  Job job = list.at(list.turn(0));
  for (int index = list.turn(0), turn = 1; index < list.jobs; ++turn) {
    const int following = list.turn(turn);
    const Job next = list.at(following);
    const int steps = (job.down ? shape.intermediate_size : shape.hidden_size) / kDepth;
    const int expert = weight_row + job.rows.expert, row = job.block * kWeightRows;
    const uint64_t policy = job.rows.count > 1 ? kEvictNormal : kEvictFirst;
    const CUtensorMap* map = job.down ? &weights.w2 : &weights.w13;
    for (int step = 0; step < steps; ++step, place.advance()) {
      barrier_wait(shared.empty_barrier(place.stage), place.parity ^ 1);
      const uint32_t full = shared.full_barrier(place.stage);
      if (step == 0) shared.job(place.stage) = job;
      barrier_arrive_expect(full, kWeightBytes);
      copy_box(shared.weights(place.stage), map, full, step * kDepth, row, expert, policy);
    }
    job = next;
    index = following;
  }
}

// The first post of the item, in registers: mostly it is the only one.
struct Posted {
  int parts, rows;
  const __nv_bfloat16* hidden;
};

// Where the token rows of one warp come from: two of its 64 rows a lane. Loaded one job ahead.
struct Sources {
  int at[2];

  __device__ static int row(int warp, int i) {
    const int nth = (threadIdx.x & 31) + 32 * i;
    return 4 * (warp + kGatherWarps * (nth / 4)) + nth % 4;
  }
  __device__ Sources(const Job& job, const Workspace& work, int warp) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int nth = row(warp, i);
      at[i] = job.rows.first_row + nth;
      if (!job.down && nth < job.rows.rows) at[i] = work.sorted_token[at[i]];
    }
  }
  // Each warp reads back only what it stored itself. A place that the sort left out holds what an earlier item left
  // there: rows are bounded.
  __device__ void store(const Shared& shared, int warp, bool down, const void* activated, const Item& item,
                        const Posted& first, int64_t row_bytes) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const void* base = activated;
      int row_of_base = at[i];
      if (!down) {
        const int part = min(at[i] >> kPartShift, first.parts - 1);
        base = part > 0 ? item.part[part].hidden : first.hidden;
        row_of_base = min(at[i] & ((1 << kPartShift) - 1), (part > 0 ? item.part[part].rows : first.rows) - 1);
      }
      shared.sources[row(warp, i)] = reinterpret_cast<uint64_t>(base) + row_of_base * row_bytes;
    }
  }
};
static_assert(kTileRows == 64 * kGatherWarps, "two rows a lane");

__device__ void gather_tokens(const Shared& shared, const JobList& list, const ServiceShape& shape,
                              const Workspace& work, const Item& item) {
  const Posted posted = {item.parts, item.part[0].rows, item.part[0].hidden};
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 - kConsumerWarps - 1;
  const int chunk = lane & 7;
  const int first = 4 * warp + lane / 8;  // of the token rows that this thread gathers, in turns of 4 kGatherWarps
  const uint32_t finished = list.gate_up_blocks * kConsumerWarps;
  Place place;
  Job job = list.at(list.turn(0));
  Sources sources(job, work, warp);
  for (int index = list.turn(0), turn = 1; index < list.jobs; ++turn) {
    const int following = list.turn(turn);
    const Job next = list.at(following);
    const int rows = job.rows.rows;
    const int width = job.down ? shape.intermediate_size : shape.hidden_size;
    if (job.down) {
      while (load_acquire_gpu(work.tile_done + job.row_tile) < finished) __nanosleep(32);
    }
    __syncwarp();
    sources.store(shared, warp, job.down, work.activated, item, posted, int64_t{width} * 2);
    sources = Sources(next, work, warp);
    __syncwarp();
    for (int step = 0; step < width / kDepth; ++step, place.advance()) {
      barrier_wait(shared.empty_barrier(place.stage), place.parity ^ 1);
      const uint32_t target = shared.tokens(place.stage);
      const uint32_t offset = step * (kDepth * 2) + chunk * 16;
#pragma unroll 4
      for (int row = first; row < rows; row += 4 * kGatherWarps) {
        gather16(target + row * 128 + ((chunk ^ (row & 7)) << 4),
                 reinterpret_cast<const char*>(shared.sources[row]) + offset);
      }
      gather_arrive(shared.full_barrier(place.stage));
    }
    job = next;
    index = following;
  }
}

// Keeps the compiler from computing the addresses of a tile's results before the product, which would spill.
template <typename T>
__device__ __forceinline__ T* fresh(T* value) {
  asm volatile("" : "+l"(value));
  return value;
}

__device__ __forceinline__ uint32_t packed(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const uint32_t&>(pair);
}

// silu(gate) * up of two columns with one reciprocal: the special function unit is what this is bound by. Below -40,
// silu is under 1e-15 and the clamp keeps the product of the denominators finite.
__device__ __forceinline__ uint32_t swiglu(float gate0, float up0, float gate1, float up1) {
  const float below0 = 1.f + __expf(fminf(-gate0, 40.f)), below1 = 1.f + __expf(fminf(-gate1, 40.f));
  const float both = __fdividef(1.f, below0 * below1);
  return packed(gate0 * up0 * (both * below1), gate1 * up1 * (both * below0));
}

// Thread (r, c) of a warp holds weight row r of each part for tokens 2c and 2c + 1 of every 8.
template <int N>
__device__ __forceinline__ void store_gate_up(const float (&sum)[2][N / 2], const Job& job, int group, int warp,
                                              const ServiceShape& shape, const Workspace& work) {
  const int lane = threadIdx.x & 31, width = shape.intermediate_size, token = (lane & 3) * 2;
  const int columns = (job.block * 2 + group) * 64;
  const int rows = columns < width ? job.rows.rows - token : 0;
  __nv_bfloat16* target = work.activated + int64_t{job.rows.first_row + token} * width + columns;
  target = fresh(target + warp * 16 + (lane / 4) * 2);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const float (&a)[N / 2] = sum[0], (&b)[N / 2] = sum[1];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = 4 * j + i;
      const uint32_t value = swiglu(a[at], a[at + 2], b[at], b[at + 2]);
      if (8 * j + i < rows) *reinterpret_cast<uint32_t*>(target + i * width) = value;
    }
    target += 8 * width;
  }
  __syncwarp();
  if (lane == 0) add_release_gpu(work.tile_done + job.row_tile, 1);
}

template <int N>
__device__ __forceinline__ void store_down(const float (&sum)[2][N / 2], const Job& job, int group, int warp,
                                           const ServiceShape& shape, const Workspace& work) {
  const int lane = threadIdx.x & 31, width = shape.hidden_size, token = (lane & 3) * 2;
  const int columns = (job.block * 2 + group) * 128;
  const int rows = columns < width ? job.rows.rows - token : 0;
  __nv_bfloat16* target = work.expert_out + int64_t{job.rows.first_row + token} * width + columns;
  target = fresh(target + warp * 32 + (lane / 4) * 4);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = 4 * j + i;
      const uint2 value = {packed(sum[0][at], sum[0][at + 2]), packed(sum[1][at], sum[1][at + 2])};
      if (8 * j + i < rows) store8_once(target + i * width, value, kEvictFirst);
    }
    target += 8 * width;
  }
}

template <int N>
__device__ __forceinline__ void multiply(const Shared& shared, Place& place, const Job& job, const ServiceShape& shape,
                                         const Workspace& work) {
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
  const bool leader = (threadIdx.x & 31) == 0;
  const int steps = (job.down ? shape.intermediate_size : shape.hidden_size) / kDepth;
  float sum[2][N / 2] = {};  // also ends their life across tiles, which would cost every variant's registers at once
  int previous = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    barrier_wait(shared.full_barrier(place.stage), place.parity);
    const uint64_t a = matrix_descriptor(shared.weights(place.stage) + group * (kWeightBytes / 2));
    const uint64_t b = matrix_descriptor(shared.tokens(place.stage));
    fence_shared_for_mma();  // the gathers are ordinary writes
    mma_begin();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        wgmma<N>(sum[half], a + half * (64 * 128 >> 4) + k * 2, b + k * 2);
      }
    }
    mma_commit();
    mma_wait<1>();
    if (step && leader) barrier_arrive(shared.empty_barrier(previous));
    previous = place.stage;
    place.advance();
  }
  mma_wait<0>();
  if (leader) barrier_arrive(shared.empty_barrier(previous));
  if (job.down) {
    store_down<N>(sum, job, group, warp, shape, work);
  } else {
    store_gate_up<N>(sum, job, group, warp, shape, work);
  }
}

__device__ __forceinline__ void multiply_jobs(const Shared& shared, const JobList& list, const ServiceShape& shape,
                                              const Workspace& work) {
  Place place;
  for (int turn = 0; list.turn(turn) < list.jobs; ++turn) {
    barrier_wait(shared.full_barrier(place.stage), place.parity);
    const Job job = shared.job(place.stage);
    const int rows = job.rows.rows;
    if (rows <= 16) {
      multiply<16>(shared, place, job, shape, work);
    } else if (rows <= 32) {
      multiply<32>(shared, place, job, shape, work);
    } else if (rows <= 64) {
      multiply<64>(shared, place, job, shape, work);
    } else if (rows <= 96) {
      multiply<96>(shared, place, job, shape, work);
    } else if (rows <= 128) {
      multiply<128>(shared, place, job, shape, work);
    } else if (rows <= 144) {
      multiply<144>(shared, place, job, shape, work);
    } else if (rows <= 160) {
      multiply<160>(shared, place, job, shape, work);
    } else if (rows <= 176) {
      multiply<176>(shared, place, job, shape, work);
    } else {
      multiply<192>(shared, place, job, shape, work);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    experts(const __grid_constant__ ExpertWeights weights, const ServiceState* state, const ServiceShape shape,
            const Workspace work) {
  extern __shared__ uint8_t raw[];
  const Shared shared(raw);
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    prefetch_map(&weights.w13);
    prefetch_map(&weights.w2);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(shared.full_barrier(stage), 1 + 32 * kGatherWarps);
      barrier_init(shared.empty_barrier(stage), kConsumerWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Item& item = state->item;
  if (item.parts == 0 || item.rows == 0) return;
  const JobList list(item, shape, work);
  if (warp < kConsumerWarps) {
    take_registers<232>();
    multiply_jobs(shared, list, shape, work);
  } else {
    give_registers<40>();
    if (warp > kConsumerWarps) {
      gather_tokens(shared, list, shape, work, item);
    } else if ((threadIdx.x & 31) == 0) {
      load_weights(shared, list, weights, shape, item.weight_row);
    }
  }
}

}  // namespace

cudaError_t prepare_experts() {
  return cudaFuncSetAttribute(experts, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
}

cudaError_t launch_experts(cudaStream_t stream, bool overlap, int blocks, const ExpertWeights& weights,
                           const ServiceState* state, const ServiceShape& shape, const Workspace& work) {
  return launch(experts, blocks, kThreads, kSharedBytes, stream, overlap, weights, state, shape, work);
}

}  // namespace ffn
