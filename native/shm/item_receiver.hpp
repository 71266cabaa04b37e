// F's side of all links: one stream of items for the one thread that computes.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "shm/item.hpp"

namespace ffn {

class ItemReceiver {
 public:
  // item_limit: most rows of an item. merge_wait_us: how long an item waits for posts of its layer from links that were
  // active just before and stood where its first link did; longer, where a step takes long, by a small part of the last
  // one. 0 = takes only what is there. Throws std::invalid_argument.
  ItemReceiver(int64_t spin_us, int64_t item_limit, int64_t merge_wait_us);
  ~ItemReceiver();
  ItemReceiver(const ItemReceiver&) = delete;
  ItemReceiver& operator=(const ItemReceiver&) = delete;

  // Any thread. A key is used once; expert_counts[layer] bounds the ids of that layer's posts. Throws std::bad_alloc.
  void add_link(int64_t key, std::shared_ptr<Arena> arena, std::vector<int32_t> expert_counts);
  void remove_link(int64_t key);  // idempotent
  // Any thread. Closes a link whose peer broke the protocol; take_faults tells of it. Idempotent.
  void fail_link(int64_t key, const std::string& reason);

  // One thread at a time. Posts take turns by link and stage; those of the same layer that are there too join the item
  // up to its limit, a post above it comes in parts, others in between. Null after the timeout, on a signal, when
  // cancelled, and when a link turned out faulty.
  std::shared_ptr<Item> receive(int64_t timeout_us);
  // receive + compute + complete; false when there was no item. Throws std::runtime_error when the kernel fails.
  bool step(const ffn_expert_kernel& kernel, int64_t timeout_us);
  void cancel();  // any thread; the pending or next receive returns null

  // Links that were closed because their peer broke the protocol, with the reason; each is told once.
  std::vector<std::pair<int64_t, std::string>> take_faults();

  int doorbell() const { return doorbell_; }
  const Counters& counters() const { return *counters_; }
  Recorder<StepSpan>& spans() { return counters_->spans; }

 private:
  struct Slot {
    std::shared_ptr<Link> link;
    int64_t stage;
    Link::Stage& post() const { return link->stages[stage]; }
    int64_t rows_left() const { return post().rows - post().taken; }
  };

  bool links_changed() const;
  void refresh();
  std::shared_ptr<Item> scan(bool& faulted);
  bool open(const Slot& slot);  // false: the link was closed, its peer broke the protocol
  Part take(const Slot& slot);
  std::shared_ptr<Item> make_item(size_t first);
  // In merging.cpp:
  void merge(std::vector<Part>& parts, size_t first);
  // Adds what is there of the first slot's layer, as far as there is room; whether more may come at once, and nothing
  // else is there to do.
  bool take_siblings(std::vector<Part>& parts, size_t first);
  bool is_in_step(const Slot& slot, const Link::Stage& leader, const std::vector<Part>& parts, int64_t now) const;
  int64_t merge_wait(const Part& first) const;  // ns, for links in step
  void close_faulty(const std::shared_ptr<Link>& link, const std::string& reason);
  // Until the doorbell rings, unless `ready` says that there is something already; false on a signal.
  bool sleep_until(int64_t deadline_ns, bool (ItemReceiver::*ready)() const);
  void set_sleeping(uint32_t value);
  static bool is_ready(const Slot& slot);
  bool anything_ready() const;
  bool anything_unopened() const;  // ready, and not seen before
  void ring() const;

  const int64_t spin_ns_;
  const int64_t item_limit_;
  const int64_t merge_wait_ns_;
  int doorbell_;
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> receiving_{false};
  const std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();

  std::mutex mutex_;  // guards links_, faults_ and the making of workspace_
  std::vector<std::shared_ptr<Link>> links_;
  std::vector<std::pair<int64_t, std::string>> faults_;
  std::shared_ptr<Workspace> workspace_;  // made before the first link that can have siblings is seen
  std::atomic<uint64_t> generation_{0};

  // Of the receiving thread:
  std::vector<Slot> slots_;
  std::shared_ptr<Workspace> merging_;  // null until there can be siblings
  uint64_t seen_generation_ = 0;
  size_t cursor_ = 0;
};

}  // namespace ffn
