#include "cam_twin/group.hpp"

#include <time.h>
#include <unistd.h>

#include <cctype>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "cam_twin/rows.hpp"
#include "cam_twin/settings.hpp"

namespace cam_twin {

namespace {

constexpr int64_t kPatienceNs = 2'000'000;

std::mutex groups_mutex;
std::map<std::string, std::shared_ptr<Group>> groups;

void require(bool holds, const std::string& reason) {
  if (!holds) throw std::runtime_error("cpu-twin: " + reason);
}

// Letters, digits and dots stay, so that any communicator name is a file name.
std::string path_of(const std::string& name) {
  static const char* digits = "0123456789abcdef";
  std::string path = settings().directory + "/cam-";
  for (const char c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.') {
      path += c;
    } else {
      path += {'_', digits[static_cast<unsigned char>(c) >> 4], digits[c & 15]};
    }
  }
  return path;
}

void delay(int64_t rank) {
  if (settings().slow_rank != rank) return;
  timespec duration{settings().slow_ms / 1000, settings().slow_ms % 1000 * 1'000'000};
  nanosleep(&duration, nullptr);
}

uint64_t mixed(uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

[[noreturn]] void sleep_for_ever() {
  while (true) pause();
}

}  // namespace

std::shared_ptr<Group> Group::join(const std::string& name, const Topology& topology, RowType row_type) {
  const std::string path = path_of(name);
  const std::lock_guard<std::mutex> lock(groups_mutex);
  const auto found = groups.find(path);
  if (found != groups.end()) {
    found->second->region_->require_same(topology, row_type);
    return found->second;
  }
  return groups[path] = std::make_shared<Group>(Region::join(path, topology, row_type));
}

std::shared_ptr<Group> Group::joined(const std::string& name, const char* operation, const char* before) {
  const std::lock_guard<std::mutex> lock(groups_mutex);
  const auto found = groups.find(path_of(name));
  require(found != groups.end(), std::string(operation) + " in group " + name + " without a " + before + " before it");
  return found->second;
}

void Group::leave_all() {
  const std::lock_guard<std::mutex> lock(groups_mutex);
  groups.clear();
}

MoeState& Group::moe_state(int64_t moe) {
  const std::lock_guard<std::mutex> lock(groups_mutex);
  return moe_states_[moe];
}

void Group::dispatch_send(int64_t attn, int64_t layer, int64_t batch, const void* x, const int32_t* ids) {
  const Topology& t = region_->topology();
  delay(attn);
  region_->claim(attn);
  Post& post = region_->post(attn);
  const uint64_t sent = post.sent.load(std::memory_order_relaxed);
  require(post.received.load(std::memory_order_relaxed) == sent || broken(kOverwriteWindow),
          "rank " + std::to_string(attn) + " dispatches layer " + std::to_string(layer) + " while layer " +
              std::to_string(post.layer) + " is in flight: combine receive must come first, the window is in use");
  for (int64_t i = 0; i < batch * t.top_k; ++i) {
    require(ids[i] >= 0 && ids[i] < t.moe_ranks * t.experts, "expert id " + std::to_string(ids[i]) + " is outside 0.." +
                                                                 std::to_string(t.moe_ranks * t.experts - 1) +
                                                                 "; the device would write where it points");
  }
  post.layer = layer;
  post.batch = batch;
  std::memcpy(region_->ids(attn), ids, batch * t.top_k * sizeof(int32_t));
  if (t.quant == 0) {
    std::memcpy(region_->rows(attn), x, batch * t.hidden * 2);
  } else {
    quantize_rows(region_->row_type(), x, batch, t.hidden, reinterpret_cast<int8_t*>(region_->rows(attn)),
                  region_->scales(attn));
  }
  post.sent.store(sent + 1, std::memory_order_release);
  for (int64_t moe = 0; moe < t.moe_ranks; ++moe) region_->wake(t.attn_ranks + moe);
}

bool Group::ready(const MoeState& state, int64_t moe, int64_t group) const {
  if (state.serving.count(group) != 0) return true;
  const Topology& t = region_->topology();
  int64_t arrived = 0;
  for (int64_t attn = group * t.tp; attn < (group + 1) * t.tp; ++attn) {
    const uint64_t done = region_->answer(attn, moe).done.load(std::memory_order_relaxed);
    arrived += region_->post(attn).sent.load(std::memory_order_acquire) != done ? 1 : 0;
  }
  return arrived == t.tp || (arrived > 0 && broken(kPartialGroup));
}

// Which of the ready DP groups comes next is the adversary's choice: a caller must not build on any order.
int64_t Group::wait_for_group(MoeState& state, int64_t moe) {
  const Topology& t = region_->topology();
  const int64_t me = t.attn_ranks + moe;
  const uint64_t draw = mixed(settings().seed ^ mixed(state.steps * 1024 + static_cast<uint64_t>(moe)));
  // Now and then it waits for a second group, so that groups meet even where F is faster than Attention.
  bool patient = draw % 4 == 0;
  for (int waits = 0;; ++waits) {
    const uint32_t seen = region_->rank(me).event.load(std::memory_order_acquire);
    std::vector<int64_t> candidates;
    for (int64_t i = 1; i <= t.groups(); ++i) {
      const int64_t group = (state.last_finished + i) % t.groups();
      if (ready(state, moe, group)) candidates.push_back(group);
    }
    if (!candidates.empty() && broken(kInOrder)) return candidates.front();
    if (candidates.size() == 1 && t.groups() > 1 && patient) {
      patient = false;
      region_->wait(me, seen, kPatienceNs);
      continue;
    }
    if (!candidates.empty()) return candidates[(draw >> 2) % candidates.size()];
    require(waits < 3 || !broken(kCancellableReceive), "the dispatch receive was given up");
    region_->wait(me, seen);
  }
}

void Group::begin(MoeState& state, int64_t moe, int64_t group) const {
  const Topology& t = region_->topology();
  MoeState::Serving serving;
  for (int64_t attn = group * t.tp; attn < (group + 1) * t.tp; ++attn) {
    const Post& post = region_->post(attn);
    const uint64_t sent = post.sent.load(std::memory_order_acquire);
    const bool arrived = sent != region_->answer(attn, moe).done.load(std::memory_order_relaxed);
    serving.sent.push_back(sent);
    serving.routings.push_back(route(region_->ids(attn), arrived ? post.batch : 0, t, moe));
    require(attn == group * t.tp || post.layer == serving.layer || broken(kPartialGroup),
            "ranks of DP group " + std::to_string(group) + " dispatched layers " + std::to_string(serving.layer) +
                " and " + std::to_string(post.layer) + " together");
    serving.layer = post.layer;
  }
  state.serving.emplace(group, std::move(serving));
}

void Group::dispatch_receive(int64_t moe, int64_t capacity, void* rows, float* scales, int64_t* info, int64_t* counts) {
  const Topology& t = region_->topology();
  const int64_t me = t.attn_ranks + moe;
  delay(me);
  region_->claim(me);
  if (settings().stuck_rank == me) sleep_for_ever();
  MoeState& state = moe_state(moe);
  require(state.outstanding.empty() || broken(kReceiveBeforeSend),
          "rank " + std::to_string(me) + " receives again before it has sent the combine of the last chunk");
  const int64_t group = wait_for_group(state, moe);
  ++state.steps;
  if (state.serving.count(group) == 0) begin(state, moe, group);
  MoeState::Serving& serving = state.serving.at(group);

  std::vector<int64_t> totals(t.experts, 0);
  for (const Routing& routing : serving.routings) {
    for (int64_t expert = 0; expert < t.experts; ++expert) totals[expert] += routing.count(expert);
  }
  const Chunk chunk = plan_chunk(totals, serving.next_expert, capacity);
  std::vector<int64_t> chunk_counts;
  state.outstanding = batch_info(t, serving.routings, group * t.tp, serving.layer, chunk, &chunk_counts);
  std::memcpy(info, state.outstanding.data(), state.outstanding.size() * sizeof(int64_t));
  std::memcpy(counts, chunk_counts.data(), chunk_counts.size() * sizeof(int64_t));

  const int64_t row_bytes = t.hidden * (t.quant != 0 ? 1 : 2);
  auto* out = static_cast<char*>(rows);
  int64_t row = 0;
  for (int64_t expert = chunk.first; expert <= chunk.last; ++expert) {
    for (int64_t tp = 0; tp < t.tp; ++tp) {
      const Routing& routing = serving.routings[tp];
      const int64_t attn = group * t.tp + tp;
      for (int64_t i = routing.starts[expert]; i < routing.starts[expert + 1]; ++i, ++row) {
        const int64_t token = routing.assignments[i] / t.top_k;
        std::memcpy(out + row * row_bytes, region_->rows(attn) + token * row_bytes, row_bytes);
        if (t.quant != 0) scales[row] = region_->scales(attn)[token];
      }
    }
  }
  // All bits set is a NaN in either row type and in float32.
  const int poison = broken(kNoPoison) ? 0 : (t.quant != 0 ? 127 : 0xff);
  std::memset(out + row * row_bytes, poison, (capacity - row) * row_bytes);
  const int64_t scale_count = t.quant != 0 ? capacity : 1;
  const int64_t filled = t.quant != 0 ? row : 0;
  std::memset(scales + filled, broken(kNoPoison) ? 0 : 0xff, (scale_count - filled) * sizeof(float));
}

void Group::combine_send(int64_t moe, const void* rows, int64_t row_count, const int64_t* info) {
  const Topology& t = region_->topology();
  const int64_t me = t.attn_ranks + moe;
  delay(me);
  MoeState& state = moe_state(moe);
  require(!state.outstanding.empty(), "rank " + std::to_string(me) + " sends a combine without a dispatch received");
  const std::vector<int64_t>& handed = state.outstanding;
  require(std::memcmp(info, handed.data(), handed.size() * sizeof(int64_t)) == 0 || broken(kAnyBatchInfo),
          "batch_info is not what dispatch receive returned; combine send takes it unmodified");
  const int64_t group = handed[1] / t.tp;
  MoeState::Serving& serving = state.serving.at(group);
  const Chunk chunk{handed[3], handed[4], 0};

  int64_t needed = 0;
  for (const Routing& routing : serving.routings) {
    needed += routing.starts[chunk.last + 1] - routing.starts[chunk.first];
  }
  require(row_count >= needed,
          "combine send has " + std::to_string(row_count) + " rows, the chunk has " + std::to_string(needed));
  const int64_t row_bytes = t.hidden * 2;
  const auto* from = static_cast<const char*>(rows);
  for (int64_t expert = chunk.first; expert <= chunk.last; ++expert) {
    for (int64_t tp = 0; tp < t.tp; ++tp) {
      const Routing& routing = serving.routings[tp];
      char* combined = region_->combined(group * t.tp + tp);
      for (int64_t i = routing.starts[expert]; i < routing.starts[expert + 1]; ++i, from += row_bytes) {
        std::memcpy(combined + routing.assignments[i] * row_bytes, from, row_bytes);
      }
    }
  }
  state.outstanding.clear();
  serving.next_expert = chunk.last + 1;
  if (serving.next_expert < t.experts) return;
  const std::vector<uint64_t> sent = serving.sent;
  state.serving.erase(group);
  state.last_finished = group;
  for (int64_t tp = 0; tp < t.tp; ++tp) {
    const int64_t attn = group * t.tp + tp;
    region_->answer(attn, moe).done.store(sent[tp], std::memory_order_release);
    region_->wake(attn);
  }
}

void Group::combine_receive(int64_t attn, int64_t batch, const int32_t* ids, const float* weights, void* out) {
  const Topology& t = region_->topology();
  delay(attn);
  Post& post = region_->post(attn);
  const uint64_t sent = post.sent.load(std::memory_order_relaxed);
  require(post.received.load(std::memory_order_relaxed) != sent,
          "rank " + std::to_string(attn) + " receives a combine without a dispatch in flight");
  const bool same = batch == post.batch && std::memcmp(ids, region_->ids(attn), batch * t.top_k * sizeof(int32_t)) == 0;
  require(same || broken(kAnyIds), "combine receive has other expert ids than the dispatch in flight (layer " +
                                       std::to_string(post.layer) + ", " + std::to_string(post.batch) + " rows)");
  for (int64_t moe = 0; moe < t.moe_ranks; ++moe) {
    while (true) {
      const uint32_t seen = region_->rank(attn).event.load(std::memory_order_acquire);
      if (region_->answer(attn, moe).done.load(std::memory_order_acquire) == sent) break;
      region_->wait(attn, seen);
    }
  }
  weighted_sums(region_->row_type(), region_->combined(attn), weights, batch, t.top_k, t.hidden, out);
  post.received.store(sent, std::memory_order_relaxed);
}

}  // namespace cam_twin
