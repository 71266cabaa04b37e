// The file that stands for the communication windows of one group: mapped by every process of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "cam_twin/planner.hpp"

namespace cam_twin {

using Word = std::atomic<uint32_t>;
using Count = std::atomic<uint64_t>;
static_assert(Word::is_always_lock_free && Count::is_always_lock_free, "shared between processes");

// Rows of both directions: fp16 or bf16, two bytes each.
enum RowType : int64_t { kHalf = 0, kBFloat16 = 1 };

struct alignas(64) Rank {
  Word event;                // bumped whenever something that this rank may wait for changed
  std::atomic<int32_t> pid;  // process that speaks for this rank, 0 while nobody does
};

// What an Attention rank has dispatched. One is in flight at a time: sent == received + 1 from DS to CR.
struct alignas(64) Post {
  Count sent;
  Count received;
  int64_t layer;
  int64_t batch;
};

struct alignas(64) Answer {
  Count done;  // the Post::sent that this F rank has answered
};

class Region {
 public:
  // Creates the file or joins it. Throws when this rank's topology or row type differs from the group's.
  static std::shared_ptr<Region> join(const std::string& path, const Topology& topology, RowType row_type);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // Throws when what an operator says of its rank differs from what the group was made with.
  void require_same(const Topology& topology, RowType row_type) const;

  const Topology& topology() const { return topology_; }
  RowType row_type() const { return row_type_; }

  // This process speaks for global rank `rank` from now on; throws when another one does.
  void claim(int64_t rank);
  Rank& rank(int64_t rank) const;
  Post& post(int64_t attn) const;
  Answer& answer(int64_t attn, int64_t moe) const;
  int32_t* ids(int64_t attn) const;    // [most_batch, top_k]
  char* rows(int64_t attn) const;      // [most_batch, hidden] int8 or row type
  float* scales(int64_t attn) const;   // [most_batch]
  char* combined(int64_t attn) const;  // [most_batch * top_k, hidden] row type, by token then place in top-k

  void wake(int64_t rank) const;
  // Blocks until `rank`'s event differs from `seen`, or that long; throws for a dead peer only where settings say so.
  void wait(int64_t rank, uint32_t seen, int64_t timeout_ns = 100'000'000) const;

 private:
  Region(void* memory, size_t bytes, const Topology& topology, RowType row_type);
  void require_peers(int64_t waiting_rank) const;

  char* memory_;
  size_t bytes_;
  Topology topology_;
  RowType row_type_;
};

}  // namespace cam_twin
