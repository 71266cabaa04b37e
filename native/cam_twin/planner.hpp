// What the Async CAM contract (compact_v2) derives from numbers alone: capacity, window sizes, chunks, batch_info.
// Pure functions, without torch, shared memory or clocks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cam_twin {

constexpr int64_t kMostRows = 262144;
constexpr int64_t kMostSeqLen = 262144;
constexpr int64_t kBatchInfoHead = 5;

// What all ranks of a group must give alike. Ranks 0..attn_ranks-1 are Attention, the moe_ranks after them are F.
struct Topology {
  int64_t max_seq_len;
  int64_t hidden;
  int64_t top_k;
  int64_t moe_ranks;
  int64_t attn_ranks;
  int64_t experts;  // routed experts of one F rank
  int64_t tp;       // Attention ranks of one DP group
  int64_t quant;    // 1: rows travel as int8 with one scale each

  int64_t groups() const { return attn_ranks / tp; }
  int64_t most_batch() const { return max_seq_len / tp; }
  int64_t batch_info_size() const { return kBatchInfoHead + tp + experts * tp; }
};

// Rows of a receive buffer for the text of BATCH_SIZE_FACTOR (null: unset). A text that is no number counts as 1.0 and
// sets `warning`; a number outside (0, 1], or one that leaves no row, throws.
int64_t receive_capacity(const char* factor, std::string* warning);

// Least bytes of the communication window of an Attention rank and of an F rank.
int64_t attention_window_bytes(const Topology& topology);
int64_t moe_window_bytes(const Topology& topology);

struct Chunk {
  int64_t first;  // local experts first..last, both included
  int64_t last;
  int64_t rows;
};

// The next chunk of one DP group: whole experts from `first` on while they fit. totals[experts] are assignments of the
// group to each local expert. Throws when one expert alone exceeds the capacity: the protocol has no way out of that.
Chunk plan_chunk(const std::vector<int64_t>& totals, int64_t first, int64_t capacity);

// Assignments of one Attention rank, sorted as they travel: by expert, then token, then place in top-k.
struct Routing {
  int64_t before;                    // assignments to experts of earlier F ranks
  std::vector<int64_t> starts;       // [experts + 1] into `assignments`
  std::vector<int32_t> assignments;  // token * top_k + place
  int64_t count(int64_t expert) const { return starts[expert + 1] - starts[expert]; }
};

// Routing of ids[batch, top_k] (global expert ids) towards F rank `moe`, counted from 0.
Routing route(const int32_t* ids, int64_t batch, const Topology& topology, int64_t moe);

// batch_info of a chunk of the DP group that begins at Attention rank `base`; routings[tp]. counts receives [experts].
std::vector<int64_t> batch_info(const Topology& topology, const std::vector<Routing>& routings, int64_t base,
                                int64_t layer, const Chunk& chunk, std::vector<int64_t>* counts);

}  // namespace cam_twin
