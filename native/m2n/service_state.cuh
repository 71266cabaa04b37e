// What F keeps in device memory, so that one captured graph serves every layer, session and size.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "m2n/times.cuh"

namespace ffn {

constexpr int kMaxLanes = 128;
constexpr int kMaxExperts = 1024;  // of one layer on one F rank
constexpr int kMaxTopK = 32;
constexpr int kTileRows = 192;  // most rows of one expert that a tile of the grouped product takes

// One (A rank, stage) as F sees it; written by the host while nothing is in flight, `expected` also by the combine.
struct Lane {
  uint64_t expected;  // flag of the next post; 0 = no lane here
  const uint64_t* dispatch_flag;
  const int32_t* dispatch_head;  // layer, rows
  const int32_t* dispatch_ids;
  const float* dispatch_weights;
  const __nv_bfloat16* dispatch_hidden;
  uint64_t* combine_flag;  // in the A rank's memory
  __nv_bfloat16* combine_partial;
  int32_t capacity;
  int32_t fault;  // 1: a layer or a number of rows out of bounds came
  int32_t layer;  // of the post taken last
  int32_t unused;
};

// One post of an item: rows first ... first + rows - 1 of it. Sorted rows are known as part << kPartShift | its row.
constexpr int kMaxParts = 8;
constexpr int kPartShift = 27;

struct Part {
  int32_t lane;
  int32_t first;
  int32_t rows;
  int32_t unused;
  const int32_t* ids;
  const float* weights;
  const __nv_bfloat16* hidden;
  __nv_bfloat16* out;
  uint64_t* out_flag;
  uint64_t flag;
};

// The item in flight: a post, or several ready ones of one layer; no parts when a wait ended without one.
struct Item {
  int32_t parts;
  int32_t rows;
  int32_t layer;
  int32_t tiles;       // entries of the tile list
  int32_t weight_row;  // row of the layer's first expert in w13 and w2
  int32_t pairs;       // rows with an expert, counted once for each expert
  uint64_t taken_ns;
  uint64_t sorted_ns;
  uint64_t computed_ns;
  Part part[kMaxParts];
};

// Rows first_row ... first_row + rows - 1 of the sorted order belong to one expert.
struct RowTile {
  int32_t expert;  // local id
  int32_t first_row;
  int32_t rows;
  int16_t index, count;  // among the tiles of its expert
};

// Counted in device memory; copied to pinned host memory, where the host reads them at any time.
struct ServiceCounters {
  uint64_t waits;
  uint64_t taken;
  uint64_t completed;
  uint64_t rows;
  uint64_t pairs;
  uint64_t experts_hit;
  uint64_t faults;
  uint64_t items;
  uint64_t wait_ns;     // of waits that ended with an item
  uint64_t compute_ns;  // from taking an item to its experts' results
  uint64_t send_ns;     // from there to the flags
};

struct ServiceState {
  ServiceCounters counters;
  Lane lanes[kMaxLanes];
  Item item;
  int32_t num_lanes;
  int32_t next_lane;  // where the next scan begins, so that no lane starves
  uint32_t combine_arrivals;
  uint32_t unused;
  TimesRing<ItemTimes> times;  // numbered as counters.items
};

// Constant after creation, passed to kernels by value.
struct ServiceShape {
  int32_t hidden_size;
  int32_t intermediate_size;
  int32_t top_k;
  int32_t num_layers;
  int32_t num_experts;  // local ones
  int32_t item_rows;    // most rows of an item
  uint32_t wait_us;     // an empty item ends the wait after this time
};

// Scratch memory of one item, sized for item_rows rows.
struct Workspace {
  int32_t* base;              // [num_layers] weight row of each layer's first expert
  int32_t* sorted_token;      // [item_rows * top_k] row of the post at each place of the sorted order
  int32_t* place;             // [item_rows * top_k] place of (row, k) in the sorted order, -1 = no expert here
  RowTile* tiles;             // [num_experts + item_rows * top_k / kTileRows]
  uint32_t* tile_done;        // as many: gate_up results written so far
  __nv_bfloat16* activated;   // [item_rows * top_k, I]
  __nv_bfloat16* expert_out;  // [item_rows * top_k, H]
};

}  // namespace ffn
