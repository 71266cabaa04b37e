// Times of single steps and posts, kept only while somebody asked for them; else a step pays one load of a flag.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "shm/sync.hpp"

namespace ffn {

// All times are CLOCK_MONOTONIC in ns. On F, one item:
struct StepSpan {
  int64_t began;     // the step before had ended, or recording began
  int64_t taken;     // the item was there
  int64_t gathered;  // posts lie side by side
  int64_t sorted;    // rows are sorted by expert; 0 where the kernel does not say
  int64_t computed;
  int64_t sent;  // the last flag is set
  int64_t layer, rows, parts;
};

// On A, one post, or one chunk of a batch above the capacity:
struct PostSpan {
  int64_t dispatching;
  int64_t dispatched;
  int64_t waiting;  // combine was called, or the chunk before was summed
  int64_t answered;
  int64_t summed;
  int64_t stage, layer, rows;  // layer as F numbers it
};

template <class Span>
class Recorder {
 public:
  static constexpr int64_t kMost = 4096;

  bool active() const { return active_.load(std::memory_order_relaxed); }
  int64_t since() const { return since_.load(std::memory_order_relaxed); }

  // Any thread: keep the next `limit` spans, forget those before. Throws std::invalid_argument.
  void start(int64_t limit) {
    if (limit < 1 || limit > kMost) {
      throw std::invalid_argument("1 to " + std::to_string(kMost) + " spans can be kept, not " + std::to_string(limit));
    }
    std::lock_guard<std::mutex> lock(mutex_);
    spans_.clear();
    spans_.reserve(limit);
    limit_ = limit;
    since_.store(now_ns(), std::memory_order_relaxed);
    active_.store(true, std::memory_order_relaxed);
  }

  void add(const Span& span) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!active() || static_cast<int64_t>(spans_.size()) >= limit_) return;
    spans_.push_back(span);
    if (static_cast<int64_t>(spans_.size()) == limit_) active_.store(false, std::memory_order_relaxed);
  }

  int64_t count() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(spans_.size());
  }

  // Any thread: stop, and hand out what was kept.
  std::vector<Span> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    active_.store(false, std::memory_order_relaxed);
    return std::exchange(spans_, {});
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Span> spans_;
  int64_t limit_ = 0;
  std::atomic<int64_t> since_{0};
  std::atomic<bool> active_{false};
};

}  // namespace ffn
