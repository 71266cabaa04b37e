// F's side of all links: one stream of posts for the one thread that computes.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffn_faas/expert_kernel.h"
#include "shm/arena.hpp"

namespace ffn {

// Read by metrics at any time; written by the receiving thread only.
struct Counters {
  std::atomic<int64_t> steps{0};
  std::atomic<int64_t> rows{0};
  std::atomic<int64_t> wait_ns{0};
  std::atomic<int64_t> compute_ns{0};
  std::atomic<int64_t> post_ns{0};
  std::atomic<int64_t> last_step_monotonic_ns{0};
  std::atomic<int64_t> taken_at_ns{0};  // 0 while no post is being computed
};

struct Link {
  struct Stage {
    uint64_t next_sequence = 1;
    std::atomic<bool> in_flight{false};
    std::vector<int32_t> ids;
    std::vector<float> weights;
  };

  Link(int64_t link_key, std::shared_ptr<Arena> memory, std::vector<int32_t> counts)
      : key(link_key), arena(std::move(memory)), expert_counts(std::move(counts)), stages(arena->geometry.stages) {}

  const int64_t key;
  const std::shared_ptr<Arena> arena;
  const std::vector<int32_t> expert_counts;  // by layer
  std::vector<Stage> stages;
  std::atomic<bool> closed{false};
};

// A post taken for computing; keeps the link's memory alive.
class Item {
 public:
  Item(std::shared_ptr<Link> link, std::shared_ptr<Counters> counters, int64_t stage, int32_t layer, int64_t rows);

  // Releases the combine flag. Throws std::logic_error the second time.
  void complete();

  const std::shared_ptr<Link> link;
  const int64_t stage;
  const int32_t layer;
  const int64_t rows;

  ffn_item view() const;

 private:
  const std::shared_ptr<Counters> counters_;
  const int64_t taken_at_;
  std::atomic<bool> completed_{false};
};

class ItemReceiver {
 public:
  explicit ItemReceiver(int64_t spin_us);
  ~ItemReceiver();
  ItemReceiver(const ItemReceiver&) = delete;
  ItemReceiver& operator=(const ItemReceiver&) = delete;

  // Any thread. A key is used once; expert_counts[layer] bounds the ids of that layer's posts.
  void add_link(int64_t key, std::shared_ptr<Arena> arena, std::vector<int32_t> expert_counts);
  void remove_link(int64_t key);  // idempotent

  // One thread at a time. Null after the timeout, on a signal, when cancelled, and when a link turned out faulty.
  std::shared_ptr<Item> receive(int64_t timeout_us);
  // receive + compute + complete; false when there was no item. Throws std::runtime_error when the kernel fails.
  bool step(const ffn_expert_kernel& kernel, int64_t timeout_us);
  void cancel();  // any thread; the pending or next receive returns null

  // Links that were closed because their peer broke the protocol, with the reason; each is told once.
  std::vector<std::pair<int64_t, std::string>> take_faults();

  int doorbell() const { return doorbell_; }
  const Counters& counters() const { return *counters_; }

 private:
  struct Slot {
    std::shared_ptr<Link> link;
    int64_t stage;
  };

  void refresh();
  std::shared_ptr<Item> scan(bool& faulted);
  std::shared_ptr<Item> take(const Slot& slot, std::string& fault);
  void close_faulty(const std::shared_ptr<Link>& link, const std::string& reason);
  bool sleep_until(int64_t deadline_ns);  // false on a signal
  void set_sleeping(uint32_t value);
  bool anything_ready() const;
  void ring() const;

  const int64_t spin_ns_;
  int doorbell_;
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> receiving_{false};
  const std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();

  std::mutex mutex_;  // guards links_ and faults_
  std::vector<std::shared_ptr<Link>> links_;
  std::vector<std::pair<int64_t, std::string>> faults_;
  std::atomic<uint64_t> generation_{0};

  // Of the receiving thread:
  std::vector<Slot> slots_;
  uint64_t seen_generation_ = 0;
  size_t cursor_ = 0;
};

}  // namespace ffn
