// Which posts become one item, and how long one waits for the others.
#include <algorithm>

#include "shm/item_receiver.hpp"

namespace ffn {
namespace {

// A link that posted, or was answered, this recently is likely to post again at once: merging may wait for it.
constexpr int64_t kActiveNs = 100'000'000;
// Experts read twice cost up to a whole step: waiting for a sibling may cost this part of the last one, and no more
// than kLongestWaitNs, since the last one may have been a long prefill.
constexpr int64_t kWaitPart = 32;
constexpr int64_t kLongestWaitNs = 4'000'000;
constexpr int64_t kShortestSleepNs = 20'000;  // below it spinning is cheaper

}  // namespace

int64_t ItemReceiver::merge_wait(const Part& first) const {
  const Link::Stage& post = first.link->stages[first.stage];
  // The next chunk of a batch, or of a long post: whoever was answered with the one before posts another layer next.
  const bool is_chunk = first.begin > 0 || (post.layer == post.layer_before && first.link->expert_counts.size() > 1);
  if (merge_wait_ns_ == 0 || first.rows == 0 || is_chunk) return 0;
  const int64_t compute = counters_->last_compute_ns.load(std::memory_order_relaxed);
  return std::max(merge_wait_ns_, std::min(compute / kWaitPart, kLongestWaitNs));
}

void ItemReceiver::merge(std::vector<Part>& parts, size_t first) {
  const int64_t begin = now_ns();
  const int64_t spin_deadline = begin + merge_wait_ns_;
  const int64_t deadline = begin + merge_wait(parts.front());
  while (take_siblings(parts, first)) {
    const int64_t now = now_ns();
    if (now >= deadline || cancelled_.load(std::memory_order_relaxed) || links_changed()) return;
    if (now < spin_deadline || deadline - now < kShortestSleepNs) {
      pause_cpu();
    } else if (!sleep_until(deadline, &ItemReceiver::anything_unopened)) {
      return;  // sleeping, since the link that is waited for may need this very core
    }
  }
}

bool ItemReceiver::take_siblings(std::vector<Part>& parts, size_t first) {
  const Link::Stage& leader = slots_[first].post();
  int64_t room = item_limit_;
  for (const Part& part : parts) room -= part.rows;
  bool others = false;
  for (size_t step = 1, count = slots_.size(); step < count; ++step) {
    const Slot& slot = slots_[(first + step) % count];
    const Link::Stage& post = slot.post();
    if (!is_ready(slot) || slot.link->closed.load(std::memory_order_acquire) || !open(slot)) continue;
    const bool fits = slot.rows_left() <= room && merging_->fits(slot.link->arena->geometry);
    if (post.layer != leader.layer || !fits) {
      others = true;
      continue;
    }
    parts.push_back(take(slot));
    room -= parts.back().rows;
  }
  if (others || room <= 0) return false;
  const int64_t now = now_ns();
  return std::any_of(slots_.begin(), slots_.end(),
                     [&](const Slot& slot) { return is_in_step(slot, leader, parts, now); });
}

// Answered together with the leader a moment ago, and not a part of the item: other stages of its links take turns with
// them on purpose.
bool ItemReceiver::is_in_step(const Slot& slot, const Link::Stage& leader, const std::vector<Part>& parts,
                              int64_t now) const {
  const Link::Stage& post = slot.post();
  return post.layer == leader.layer_before && !post.in_flight.load(std::memory_order_acquire) &&
         now - post.active_ns.load(std::memory_order_relaxed) < kActiveNs &&
         !slot.link->closed.load(std::memory_order_acquire) &&
         std::none_of(parts.begin(), parts.end(), [&](const Part& part) { return part.link == slot.link; });
}

}  // namespace ffn
