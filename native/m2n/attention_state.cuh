// What one A rank keeps in device memory for one stage: captured graphs hold its address and survive a new session.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "m2n/times.cuh"

namespace ffn {

constexpr int kMaxServiceRanks = 64;

// The windows of one F rank, written by the host when a session begins.
struct AttentionLink {
  uint64_t* dispatch_flag;  // in F's memory, like all dispatch_*
  int32_t* dispatch_head;
  int32_t* dispatch_ids;
  float* dispatch_weights;
  __nv_bfloat16* dispatch_hidden;
  const uint64_t* combine_flag;
  const __nv_bfloat16* combine_partial;
  uint64_t epoch;        // of its session, as in a flag word; F ranks count them each for itself
  int32_t first_expert;  // global id of its first expert
  int32_t unused;
};

struct DispatchCall {
  const __nv_bfloat16* x;  // [rows, hidden_size]
  const int32_t* ids;      // [rows, top_k] global ids, -1 = no expert
  const float* weights;    // [rows, top_k]
  int32_t rows;
  int32_t hidden_size;
  int32_t top_k;
  int32_t layer;
};

// Only the kernels of the stage, which run one after the other, write what is not said to be the host's.
struct AttentionStage {
  AttentionLink links[kMaxServiceRanks];
  AttentionLink next[kMaxServiceRanks];  // the host's: of the session offered
  int32_t rows[kMaxServiceRanks];        // sent so far in the post being written
  int32_t num_links;
  int32_t num_experts;  // global
  int32_t capacity;
  uint32_t arrivals;
  uint64_t sequence;    // of the post outstanding or answered last; its flag is that of flags.cuh; 0 before the first
  uint64_t timeout_ns;  // of a wait; 0 = none
  uint32_t status;      // 0 = fine, 1 = stopped, 2 = timed out; sticks until a new session
  uint32_t active;      // number of the session that posts go to
  uint32_t offered;     // the host's: number of a session to go over to while waiting; 0 while it is being written
  uint32_t unused;
  int32_t* slot;         // [links, capacity] place of a row in the post to each F rank, -1 = not sent
  DispatchCall pending;  // the post outstanding; its inputs live until the sum
  TimesRing<PostTimes>* times;
  uint64_t posts;  // answered so far
  uint64_t dispatching_ns, dispatched_ns;
};

enum Control : uint32_t { kRun = 0, kStop = 1, kTrap = 2 };

// Pinned, one for each stage: a wait that takes long says so, so that the host can tell whose answer is overdue.
struct WaitReport {
  uint64_t flag;  // 0 = no wait is long
  uint32_t link;
  uint32_t unused;
};

struct SumCall {
  __nv_bfloat16* out;  // [rows, hidden_size]
  int32_t rows;
  int32_t hidden_size;
};

}  // namespace ffn
