#include "shm/item_receiver.hpp"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace ffn {

Item::Item(std::shared_ptr<Link> from, std::shared_ptr<Counters> counters, int64_t stage_index, int32_t layer_index,
           int64_t row_count)
    : link(std::move(from)),
      stage(stage_index),
      layer(layer_index),
      rows(row_count),
      counters_(std::move(counters)),
      taken_at_(now_ns()) {
  counters_->taken_at_ns.store(taken_at_, std::memory_order_relaxed);
}

ffn_item Item::view() const {
  const Arena& arena = *link->arena;
  const Link::Stage& copies = link->stages[stage];
  ffn_item item{};
  item.link = link->key;
  item.rows = rows;
  item.stage = static_cast<int32_t>(stage);
  item.layer = layer;
  item.top_k = static_cast<int32_t>(arena.geometry.top_k);
  item.hidden_size = static_cast<int32_t>(arena.geometry.hidden_size);
  item.element_size = static_cast<int32_t>(arena.geometry.element_size);
  item.hidden = arena.dispatch_hidden(stage);
  item.expert_ids = copies.ids.data();
  item.weights = copies.weights.data();
  item.partial = arena.combine_partial(stage);
  return item;
}

void Item::complete() {
  if (completed_.exchange(true)) throw std::logic_error("this item was completed before");
  const int64_t computed_at = now_ns();
  Link::Stage& state = link->stages[stage];
  const Arena& arena = *link->arena;
  const uint64_t flag = make_flag(arena.epoch, state.next_sequence - 1);
  state.in_flight.store(false, std::memory_order_release);
  if (!link->closed.load(std::memory_order_acquire)) {
    arena.combine_flag(stage).store(flag, std::memory_order_release);
    full_fence();
    wake_if_sleeping(arena.combine_sleeping(stage));
  }
  const int64_t posted_at = now_ns();
  counters_->compute_ns.fetch_add(computed_at - taken_at_, std::memory_order_relaxed);
  counters_->post_ns.fetch_add(posted_at - computed_at, std::memory_order_relaxed);
  counters_->rows.fetch_add(rows, std::memory_order_relaxed);
  counters_->steps.fetch_add(1, std::memory_order_relaxed);
  counters_->last_step_monotonic_ns.store(posted_at, std::memory_order_relaxed);
  counters_->taken_at_ns.store(0, std::memory_order_relaxed);
}

ItemReceiver::ItemReceiver(int64_t spin_us) : spin_ns_(spin_us * 1000) {
  doorbell_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (doorbell_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

ItemReceiver::~ItemReceiver() { close(doorbell_); }

void ItemReceiver::ring() const {
  const uint64_t one = 1;
  // Fails only when the counter is full, which wakes the receiver just as well.
  [[maybe_unused]] const ssize_t written = write(doorbell_, &one, sizeof(one));
}

void ItemReceiver::add_link(int64_t key, std::shared_ptr<Arena> arena, std::vector<int32_t> expert_counts) {
  auto link = std::make_shared<Link>(key, std::move(arena), std::move(expert_counts));
  for (Link::Stage& stage : link->stages) {
    stage.ids.resize(link->arena->geometry.capacity * link->arena->geometry.top_k);
    stage.weights.resize(stage.ids.size());
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& other : links_) {
      if (other->key == key) throw std::invalid_argument("link " + std::to_string(key) + " exists already");
    }
    links_.push_back(std::move(link));
    generation_.fetch_add(1, std::memory_order_release);
  }
  ring();
}

void ItemReceiver::remove_link(int64_t key) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(links_.begin(), links_.end(), [key](const auto& link) { return link->key == key; });
    if (found == links_.end()) return;
    (*found)->closed.store(true, std::memory_order_release);
    links_.erase(found);
    generation_.fetch_add(1, std::memory_order_release);
  }
  ring();
}

void ItemReceiver::close_faulty(const std::shared_ptr<Link>& link, const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find(links_.begin(), links_.end(), link);
  if (found == links_.end()) return;
  link->closed.store(true, std::memory_order_release);
  links_.erase(found);
  faults_.emplace_back(link->key, reason);
  generation_.fetch_add(1, std::memory_order_release);
}

std::vector<std::pair<int64_t, std::string>> ItemReceiver::take_faults() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(faults_, {});
}

void ItemReceiver::cancel() {
  cancelled_.store(true, std::memory_order_release);
  ring();
}

void ItemReceiver::refresh() {
  if (generation_.load(std::memory_order_acquire) == seen_generation_) return;
  std::vector<Slot> slots;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    seen_generation_ = generation_.load(std::memory_order_relaxed);
    for (const auto& link : links_) {
      for (int64_t stage = 0; stage < link->arena->geometry.stages; ++stage) slots.push_back({link, stage});
    }
  }
  slots_.swap(slots);  // what was removed is freed here, outside the lock
}

bool ItemReceiver::anything_ready() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
    const Link::Stage& state = slot.link->stages[slot.stage];
    const Arena& arena = *slot.link->arena;
    return !state.in_flight.load(std::memory_order_acquire) &&
           arena.dispatch_flag(slot.stage).load(std::memory_order_acquire) ==
               make_flag(arena.epoch, state.next_sequence);
  });
}

std::shared_ptr<Item> ItemReceiver::scan(bool& faulted) {
  const size_t count = slots_.size();
  for (size_t step = 0; step < count; ++step) {
    const size_t index = (cursor_ + step) % count;
    const Slot& slot = slots_[index];
    Link::Stage& state = slot.link->stages[slot.stage];
    const Arena& arena = *slot.link->arena;
    if (state.in_flight.load(std::memory_order_acquire)) continue;
    if (arena.dispatch_flag(slot.stage).load(std::memory_order_acquire) != make_flag(arena.epoch, state.next_sequence))
      continue;
    if (slot.link->closed.load(std::memory_order_acquire)) continue;
    cursor_ = index + 1;
    std::string fault;
    auto item = take(slot, fault);
    if (item == nullptr) {
      close_faulty(slot.link, fault);
      faulted = true;
    }
    return item;
  }
  return nullptr;
}

std::shared_ptr<Item> ItemReceiver::take(const Slot& slot, std::string& fault) {
  Link& link = *slot.link;
  const Arena& arena = *link.arena;
  Link::Stage& state = link.stages[slot.stage];
  const int32_t layer = arena.dispatch_head(slot.stage)[0].load(std::memory_order_relaxed);
  const int32_t rows = arena.dispatch_head(slot.stage)[1].load(std::memory_order_relaxed);
  if (layer < 0 || layer >= static_cast<int64_t>(link.expert_counts.size())) {
    fault = "a post names layer " + std::to_string(layer) + " of " + std::to_string(link.expert_counts.size());
    return nullptr;
  }
  if (rows < 0 || rows > arena.geometry.capacity) {
    fault = "a post of layer " + std::to_string(layer) + " has " + std::to_string(rows) + " rows, capacity is " +
            std::to_string(arena.geometry.capacity);
    return nullptr;
  }
  const int64_t count = rows * arena.geometry.top_k;
  // Checked after the copy: the peer cannot change what was checked.
  std::memcpy(state.ids.data(), arena.dispatch_ids(slot.stage), count * sizeof(int32_t));
  std::memcpy(state.weights.data(), arena.dispatch_weights(slot.stage), count * sizeof(float));
  const int32_t experts = link.expert_counts[layer];
  const auto bad = std::find_if(state.ids.begin(), state.ids.begin() + count,
                                [experts](int32_t id) { return id < -1 || id >= experts; });
  if (bad != state.ids.begin() + count) {
    fault = "a post of layer " + std::to_string(layer) + " names local expert " + std::to_string(*bad) + " of " +
            std::to_string(experts);
    return nullptr;
  }
  ++state.next_sequence;
  state.in_flight.store(true, std::memory_order_release);
  return std::make_shared<Item>(slot.link, counters_, slot.stage, layer, rows);
}

void ItemReceiver::set_sleeping(uint32_t value) {
  for (const Slot& slot : slots_) {
    if (slot.stage == 0) slot.link->arena->receiver_sleeping().store(value, std::memory_order_relaxed);
  }
}

bool ItemReceiver::sleep_until(int64_t deadline_ns) {
  set_sleeping(1);
  full_fence();
  bool interrupted = false;
  const int64_t left = deadline_ns - now_ns();
  if (left > 0 && !anything_ready()) {
    pollfd entry{doorbell_, POLLIN, 0};
    timespec timeout{left / 1'000'000'000, left % 1'000'000'000};
    interrupted = ppoll(&entry, 1, &timeout, nullptr) < 0 && errno == EINTR;
  }
  set_sleeping(0);
  uint64_t rings;
  [[maybe_unused]] const ssize_t drained = read(doorbell_, &rings, sizeof(rings));
  return !interrupted;
}

std::shared_ptr<Item> ItemReceiver::receive(int64_t timeout_us) {
  if (receiving_.exchange(true)) throw std::logic_error("another thread is receiving");
  struct Reset {
    std::atomic<bool>& flag;
    ~Reset() { flag.store(false); }
  } reset{receiving_};

  const int64_t start = now_ns();
  const int64_t deadline = start + timeout_us * 1000;
  const int64_t spin_deadline = std::min(deadline, start + spin_ns_);
  std::shared_ptr<Item> item;
  for (bool faulted = false; !faulted;) {
    if (cancelled_.exchange(false, std::memory_order_acquire)) break;
    refresh();
    item = scan(faulted);
    if (item != nullptr || faulted) break;
    const int64_t now = now_ns();
    if (now < spin_deadline) {
      pause_cpu();
      continue;
    }
    if (now >= deadline || !sleep_until(deadline)) break;
  }
  counters_->wait_ns.fetch_add(now_ns() - start, std::memory_order_relaxed);
  return item;
}

bool ItemReceiver::step(const ffn_expert_kernel& kernel, int64_t timeout_us) {
  const auto item = receive(timeout_us);
  if (item == nullptr) return false;
  const ffn_item view = item->view();
  const int code = kernel.compute(kernel.self, &view);
  if (code != 0) throw std::runtime_error("the expert kernel failed with code " + std::to_string(code));
  item->complete();
  return true;
}

}  // namespace ffn
