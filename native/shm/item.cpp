#include "shm/item.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>

namespace ffn {
namespace {

template <typename T>
T* allocate(int64_t count) {
  const auto nbytes = static_cast<size_t>(count) * sizeof(T);
  void* memory = std::aligned_alloc(kAlignment, (nbytes + kAlignment - 1) / kAlignment * kAlignment);
  if (memory == nullptr) throw std::bad_alloc();
  return static_cast<T*>(memory);
}

Geometry with_capacity(Geometry geometry, int64_t rows) {
  geometry.capacity = rows;
  return geometry;
}

int64_t total_rows(const std::vector<Part>& parts) {
  return std::accumulate(parts.begin(), parts.end(), int64_t{0},
                         [](int64_t sum, const Part& part) { return sum + part.rows; });
}

}  // namespace

Workspace::Workspace(const Geometry& shape, int64_t rows)
    : geometry(with_capacity(shape, rows)),
      hidden(allocate<char>(rows * shape.hidden_size * shape.element_size)),
      ids(allocate<int32_t>(rows * shape.top_k)),
      weights(allocate<float>(rows * shape.top_k)),
      partial(allocate<float>(rows * shape.hidden_size)) {}

bool Workspace::fits(const Geometry& other) const {
  return other.hidden_size == geometry.hidden_size && other.top_k == geometry.top_k &&
         other.element_size == geometry.element_size;
}

Item::Item(std::vector<Part> taken, int32_t layer_index, std::shared_ptr<Workspace> workspace,
           std::shared_ptr<Counters> counters)
    : parts(std::move(taken)),
      layer(layer_index),
      rows(total_rows(parts)),
      workspace_(parts.size() > 1 ? std::move(workspace) : nullptr),
      counters_(std::move(counters)),
      taken_at_(now_ns()),
      recorded_(counters_->spans.active()) {
  counters_->taken_at_ns.store(taken_at_, std::memory_order_relaxed);
  if (workspace_ != nullptr) {
    workspace_->in_use.store(true, std::memory_order_relaxed);
    gather();
  }
  if (recorded_) gathered_at_ = now_ns();
}

Item::~Item() {
  if (workspace_ != nullptr && !completed_.load()) workspace_->in_use.store(false, std::memory_order_release);
}

void Item::gather() const {
  const int64_t top_k = workspace_->geometry.top_k;
  const int64_t row_bytes = workspace_->geometry.hidden_size * workspace_->geometry.element_size;
  int64_t row = 0;
  for (const Part& part : parts) {
    const Link::Stage& post = part.link->stages[part.stage];
    const char* source = part.link->arena->dispatch_hidden(part.stage);
    std::memcpy(workspace_->hidden.get() + row * row_bytes, source + part.begin * row_bytes, part.rows * row_bytes);
    std::copy_n(post.ids.data() + part.begin * top_k, part.rows * top_k, workspace_->ids.get() + row * top_k);
    std::copy_n(post.weights.data() + part.begin * top_k, part.rows * top_k, workspace_->weights.get() + row * top_k);
    row += part.rows;
  }
}

ffn_item Item::view() const {
  const Part& part = parts.front();
  const Arena& arena = *part.link->arena;
  const Link::Stage& post = part.link->stages[part.stage];
  const Geometry& geometry = arena.geometry;
  ffn_item item{};
  item.link = part.link->key;
  item.rows = rows;
  item.stage = static_cast<int32_t>(part.stage);
  item.layer = layer;
  item.top_k = static_cast<int32_t>(geometry.top_k);
  item.hidden_size = static_cast<int32_t>(geometry.hidden_size);
  item.element_size = static_cast<int32_t>(geometry.element_size);
  if (workspace_ != nullptr) {
    item.hidden = workspace_->hidden.get();
    item.expert_ids = workspace_->ids.get();
    item.weights = workspace_->weights.get();
    item.partial = workspace_->partial.get();
  } else {
    item.hidden = arena.dispatch_hidden(part.stage) + part.begin * geometry.hidden_size * geometry.element_size;
    item.expert_ids = post.ids.data() + part.begin * geometry.top_k;
    item.weights = post.weights.data() + part.begin * geometry.top_k;
    item.partial = arena.combine_partial(part.stage) + part.begin * geometry.hidden_size;
  }
  if (recorded_) item.sorted_at = &sorted_at_;
  return item;
}

void Item::answer(const Part& part, int64_t first_row, int64_t now) const {
  const Arena& arena = *part.link->arena;
  const bool open = !part.link->closed.load(std::memory_order_acquire);
  if (workspace_ != nullptr && open) {
    const int64_t hidden_size = arena.geometry.hidden_size;
    std::copy_n(workspace_->partial.get() + first_row * hidden_size, part.rows * hidden_size,
                arena.combine_partial(part.stage) + part.begin * hidden_size);
  }
  part.link->stages[part.stage].active_ns.store(now, std::memory_order_relaxed);
  part.link->stages[part.stage].in_flight.store(false, std::memory_order_release);
  if (part.sequence == 0 || !open) return;
  arena.combine_flag(part.stage).store(make_flag(arena.epoch, part.sequence), std::memory_order_release);
  full_fence();
  wake_if_sleeping(arena.combine_sleeping(part.stage));
}

void Item::complete() {
  if (completed_.exchange(true)) throw std::logic_error("this item was completed before");
  const int64_t computed_at = now_ns();
  Counters& counters = *counters_;
  if (ExpertRows* experts = counters.experts.load(std::memory_order_acquire)) {
    const ffn_item item = view();
    experts->count(layer, item.expert_ids, rows * item.top_k);
  }
  int64_t row = 0, posts = 0;
  for (const Part& part : parts) {
    answer(part, row, computed_at);
    row += part.rows;
    posts += part.sequence != 0;
  }
  if (workspace_ != nullptr) workspace_->in_use.store(false, std::memory_order_release);
  const int64_t posted_at = now_ns();
  const int64_t before = counters.last_step_monotonic_ns.load(std::memory_order_relaxed);
  counters.wait.observe(std::max<int64_t>(0, taken_at_ - (before != 0 ? before : counters.made_at_ns)));
  if (recorded_) {
    const int64_t began = std::min(taken_at_, std::max(before, counters.spans.since()));
    counters.spans.add({began, taken_at_, gathered_at_, sorted_at_, computed_at, posted_at, layer, rows,
                        static_cast<int64_t>(parts.size())});
  }
  counters.compute.observe(computed_at - taken_at_);
  if (rows > 0) counters.last_compute_ns.store(computed_at - taken_at_, std::memory_order_relaxed);
  counters.send.observe(posted_at - computed_at);
  counters.parts.observe(static_cast<int64_t>(parts.size()));
  add(counters.splits, posts == 0);
  add(counters.posts, posts);
  add(counters.rows, rows);
  counters.last_step_monotonic_ns.store(posted_at, std::memory_order_relaxed);
  counters.taken_at_ns.store(0, std::memory_order_relaxed);
  add(counters.steps, 1);
}

}  // namespace ffn
