#include "cam_twin/planner.hpp"

#include <cstdlib>
#include <stdexcept>

namespace cam_twin {

namespace {

int64_t aligned(int64_t bytes) { return (bytes + 31) / 32 * 32; }

}  // namespace

int64_t receive_capacity(const char* factor, std::string* warning) {
  float value = 1.0F;
  if (factor != nullptr) {
    char* end = nullptr;
    value = std::strtof(factor, &end);
    if (end == factor || *end != '\0') {
      *warning = std::string("BATCH_SIZE_FACTOR=") + factor + " is not a number, 1.0 is taken";
      value = 1.0F;
    }
  }
  if (!(value > 0.0F && value <= 1.0F)) {
    throw std::runtime_error(std::string("BATCH_SIZE_FACTOR=") + factor + " is outside (0, 1]");
  }
  const auto rows = static_cast<int64_t>(static_cast<float>(kMostRows) * value);
  if (rows < 1) throw std::runtime_error(std::string("BATCH_SIZE_FACTOR=") + factor + " leaves no row to receive into");
  return rows;
}

int64_t attention_window_bytes(const Topology& t) {
  const int64_t all_experts = t.moe_ranks * t.experts;
  return aligned(4 * (t.moe_ranks + all_experts) * 48) + aligned(4 * t.moe_ranks) +
         aligned(2 * t.hidden * t.most_batch() * t.top_k) + 32;
}

int64_t moe_window_bytes(const Topology& t) {
  const int64_t row = t.quant != 0 ? t.hidden + 32 : 2 * t.hidden;
  const int64_t per_rank =
      aligned(40) + 2 * aligned(4 * t.experts) + aligned(row * t.most_batch()) + aligned(2 * t.most_batch() * t.top_k);
  return t.attn_ranks * per_rank + 32;
}

Chunk plan_chunk(const std::vector<int64_t>& totals, int64_t first, int64_t capacity) {
  const auto experts = static_cast<int64_t>(totals.size());
  if (totals[first] > capacity) {
    throw std::runtime_error("local expert " + std::to_string(first) + " has " + std::to_string(totals[first]) +
                             " rows of one DP group, the receive buffer holds " + std::to_string(capacity) +
                             ": the protocol cannot divide an expert");
  }
  Chunk chunk{first, first, totals[first]};
  while (chunk.last + 1 < experts && chunk.rows + totals[chunk.last + 1] <= capacity) {
    chunk.rows += totals[++chunk.last];
  }
  return chunk;
}

Routing route(const int32_t* ids, int64_t batch, const Topology& t, int64_t moe) {
  const int64_t assignments = batch * t.top_k;
  const int64_t first = moe * t.experts;
  Routing routing{0, std::vector<int64_t>(t.experts + 1, 0), {}};
  for (int64_t i = 0; i < assignments; ++i) {
    if (ids[i] < first) ++routing.before;
    if (ids[i] >= first && ids[i] < first + t.experts) ++routing.starts[ids[i] - first + 1];
  }
  for (int64_t expert = 0; expert < t.experts; ++expert) routing.starts[expert + 1] += routing.starts[expert];
  routing.assignments.resize(routing.starts[t.experts]);
  std::vector<int64_t> next(routing.starts.begin(), routing.starts.end() - 1);
  for (int64_t i = 0; i < assignments; ++i) {
    if (ids[i] >= first && ids[i] < first + t.experts) {
      routing.assignments[next[ids[i] - first]++] = static_cast<int32_t>(i);
    }
  }
  return routing;
}

std::vector<int64_t> batch_info(const Topology& t, const std::vector<Routing>& routings, int64_t base, int64_t layer,
                                const Chunk& chunk, std::vector<int64_t>* counts) {
  std::vector<int64_t> info(t.batch_info_size(), 0);
  counts->assign(t.experts, 0);
  int64_t total = 0;
  for (int64_t tp = 0; tp < t.tp; ++tp) {
    total += routings[tp].starts[t.experts];
    info[kBatchInfoHead + tp] = routings[tp].before;
    for (int64_t expert = chunk.first; expert <= chunk.last; ++expert) {
      info[kBatchInfoHead + t.tp + tp * t.experts + expert] = routings[tp].count(expert);
      (*counts)[expert] += routings[tp].count(expert);
    }
  }
  info[0] = total;
  info[1] = base;
  info[2] = layer;
  info[3] = chunk.first;
  info[4] = chunk.last;
  return info;
}

}  // namespace cam_twin
