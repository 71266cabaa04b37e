// One process's part in a group: the four operators of the exchange, on raw memory.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cam_twin/planner.hpp"
#include "cam_twin/region.hpp"

namespace cam_twin {

// What one F rank of this process remembers between its operators.
struct MoeState {
  struct Serving {  // a DP group of which at least one chunk was delivered
    std::vector<Routing> routings;
    std::vector<uint64_t> sent;
    int64_t layer = 0;
    int64_t next_expert = 0;
  };
  std::map<int64_t, Serving> serving;  // by DP group
  std::vector<int64_t> outstanding;    // batch_info of the chunk whose combine send is due; empty when none is
  uint64_t steps = 0;
  int64_t last_finished = -1;
};

class Group {
 public:
  // Group `name` in the configured directory, which this process joins when it has not yet.
  static std::shared_ptr<Group> join(const std::string& name, const Topology& topology, RowType row_type);
  // The same group where an earlier operator must have joined it.
  static std::shared_ptr<Group> joined(const std::string& name, const char* operation, const char* before);
  // Forgets every group of this process. No operator may be running.
  static void leave_all();

  explicit Group(std::shared_ptr<Region> region) : region_(std::move(region)) {}
  const Region& region() const { return *region_; }

  void dispatch_send(int64_t attn, int64_t layer, int64_t batch, const void* x, const int32_t* ids);
  // Blocks until a DP group has something for this F rank; cannot be cancelled. rows [capacity, hidden], scales
  // [capacity] where quantized; the rest of both is poisoned.
  void dispatch_receive(int64_t moe, int64_t capacity, void* rows, float* scales, int64_t* batch_info, int64_t* counts);
  void combine_send(int64_t moe, const void* rows, int64_t row_count, const int64_t* batch_info);
  // Blocks until every F rank has answered.
  void combine_receive(int64_t attn, int64_t batch, const int32_t* ids, const float* weights, void* out);

 private:
  MoeState& moe_state(int64_t moe);
  bool ready(const MoeState& state, int64_t moe, int64_t group) const;
  int64_t wait_for_group(MoeState& state, int64_t moe);
  void begin(MoeState& state, int64_t moe, int64_t group) const;

  std::shared_ptr<Region> region_;
  std::map<int64_t, MoeState> moe_states_;
};

}  // namespace cam_twin
