#include "shm/item_receiver.hpp"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace ffn {

ItemReceiver::ItemReceiver(int64_t spin_us, int64_t item_limit, int64_t merge_wait_us)
    : spin_ns_(spin_us * 1000), item_limit_(item_limit), merge_wait_ns_(merge_wait_us * 1000) {
  if (item_limit < 1) throw std::invalid_argument("the item limit is " + std::to_string(item_limit) + " rows");
  if (merge_wait_us < 0) throw std::invalid_argument("the wait for siblings is negative");
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
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& other : links_) {
      if (other->key == key) throw std::invalid_argument("link " + std::to_string(key) + " exists already");
    }
    const Geometry& geometry = link->arena->geometry;
    if (workspace_ == nullptr && (!links_.empty() || geometry.stages > 1)) {
      workspace_ = std::make_shared<Workspace>(geometry, item_limit_);
    }
    if (counters_->experts_owner == nullptr && !link->expert_counts.empty()) {
      const auto& counts = link->expert_counts;
      counters_->experts_owner =
          std::make_unique<ExpertRows>(counts.size(), *std::max_element(counts.begin(), counts.end()));
      counters_->experts.store(counters_->experts_owner.get(), std::memory_order_release);
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

void ItemReceiver::fail_link(int64_t key, const std::string& reason) {
  std::shared_ptr<Link> link;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& other : links_) {
      if (other->key == key) link = other;
    }
  }
  if (link == nullptr) return;
  close_faulty(link, reason);
  cancel();
}

std::vector<std::pair<int64_t, std::string>> ItemReceiver::take_faults() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(faults_, {});
}

void ItemReceiver::cancel() {
  cancelled_.store(true, std::memory_order_release);
  ring();
}

bool ItemReceiver::links_changed() const { return generation_.load(std::memory_order_acquire) != seen_generation_; }

void ItemReceiver::refresh() {
  if (!links_changed()) return;
  std::vector<Slot> slots;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    seen_generation_ = generation_.load(std::memory_order_relaxed);
    merging_ = workspace_;
    for (const auto& link : links_) {
      for (int64_t stage = 0; stage < link->arena->geometry.stages; ++stage) slots.push_back({link, stage});
    }
  }
  slots_.swap(slots);  // what was removed is freed here, outside the lock
}

bool ItemReceiver::is_ready(const Slot& slot) {
  const Link::Stage& post = slot.post();
  if (post.in_flight.load(std::memory_order_acquire)) return false;
  const Arena& arena = *slot.link->arena;
  return post.open ||
         arena.dispatch_flag(slot.stage).load(std::memory_order_acquire) == make_flag(arena.epoch, post.next_sequence);
}

bool ItemReceiver::anything_ready() const { return std::any_of(slots_.begin(), slots_.end(), is_ready); }

bool ItemReceiver::anything_unopened() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return is_ready(slot) && !slot.post().open && !slot.link->closed.load(std::memory_order_acquire);
  });
}

std::shared_ptr<Item> ItemReceiver::scan(bool& faulted) {
  const size_t count = slots_.size();
  for (size_t step = 0; step < count; ++step) {
    const size_t index = (cursor_ + step) % count;
    const Slot& slot = slots_[index];
    if (!is_ready(slot) || slot.link->closed.load(std::memory_order_acquire)) continue;
    cursor_ = index + 1;
    faulted = !open(slot);
    return faulted ? nullptr : make_item(index);
  }
  return nullptr;
}

bool ItemReceiver::open(const Slot& slot) {
  Link::Stage& post = slot.post();
  if (post.open) return true;
  Link& link = *slot.link;
  const Arena& arena = *link.arena;
  const int32_t layer = arena.dispatch_head(slot.stage)[0].load(std::memory_order_relaxed);
  const int32_t rows = arena.dispatch_head(slot.stage)[1].load(std::memory_order_relaxed);
  if (layer < 0 || layer >= static_cast<int64_t>(link.expert_counts.size())) {
    close_faulty(slot.link,
                 "a post names layer " + std::to_string(layer) + " of " + std::to_string(link.expert_counts.size()));
    return false;
  }
  if (rows < 0 || rows > arena.geometry.capacity) {
    close_faulty(slot.link, "a post of layer " + std::to_string(layer) + " has " + std::to_string(rows) +
                                " rows, capacity is " + std::to_string(arena.geometry.capacity));
    return false;
  }
  const int64_t count = rows * arena.geometry.top_k;
  // Checked after the copy: the peer cannot change what was checked.
  std::memcpy(post.ids.data(), arena.dispatch_ids(slot.stage), count * sizeof(int32_t));
  std::memcpy(post.weights.data(), arena.dispatch_weights(slot.stage), count * sizeof(float));
  const int32_t experts = link.expert_counts[layer];
  const auto bad = std::find_if(post.ids.begin(), post.ids.begin() + count,
                                [experts](int32_t id) { return id < -1 || id >= experts; });
  if (bad != post.ids.begin() + count) {
    close_faulty(slot.link, "a post of layer " + std::to_string(layer) + " names local expert " + std::to_string(*bad) +
                                " of " + std::to_string(experts));
    return false;
  }
  post.open = true;
  post.layer_before = post.layer;
  post.layer = layer;
  post.rows = rows;
  post.taken = 0;
  post.active_ns.store(now_ns(), std::memory_order_relaxed);
  return true;
}

Part ItemReceiver::take(const Slot& slot) {
  Link::Stage& post = slot.post();
  Part part{slot.link, slot.stage, post.taken, std::min(slot.rows_left(), item_limit_), 0};
  post.taken += part.rows;
  if (post.taken == post.rows) {
    post.open = false;
    part.sequence = post.next_sequence++;
  }
  post.in_flight.store(true, std::memory_order_release);
  return part;
}

std::shared_ptr<Item> ItemReceiver::make_item(size_t first) {
  const int32_t layer = slots_[first].post().layer;
  std::vector<Part> parts{take(slots_[first])};
  const auto& workspace = merging_;
  if (workspace != nullptr && workspace->fits(slots_[first].link->arena->geometry) &&
      !workspace->in_use.load(std::memory_order_acquire)) {
    merge(parts, first);
  }
  return std::make_shared<Item>(std::move(parts), layer, workspace, counters_);
}

void ItemReceiver::set_sleeping(uint32_t value) {
  for (const Slot& slot : slots_) {
    if (slot.stage == 0) slot.link->arena->receiver_sleeping().store(value, std::memory_order_relaxed);
  }
}

bool ItemReceiver::sleep_until(int64_t deadline_ns, bool (ItemReceiver::*ready)() const) {
  set_sleeping(1);
  full_fence();
  bool interrupted = false;
  const int64_t left = deadline_ns - now_ns();
  if (left > 0 && !(this->*ready)()) {
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
    if (now >= deadline || !sleep_until(deadline, &ItemReceiver::anything_ready)) break;
  }
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
