// What a receiver counts while it works: written by the thread that steps, read by metrics at any time.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "shm/spans.hpp"
#include "shm/sync.hpp"

namespace ffn {

using Count = std::atomic<int64_t>;

// One writer: a plain load and store, no locked instruction.
inline void add(Count& count, int64_t value) {
  count.store(count.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
}

// Counts of values by upper bound (inclusive); one more bucket is above the last bound.
template <size_t N>
class Histogram {
 public:
  explicit constexpr Histogram(const std::array<int64_t, N>& bounds) : bounds_(bounds) {}

  void observe(int64_t value) {
    add(counts_[std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin()], 1);
    add(total_, value);
  }
  const std::array<int64_t, N>& bounds() const { return bounds_; }
  int64_t count(size_t bucket) const { return counts_[bucket].load(std::memory_order_relaxed); }
  int64_t total() const { return total_.load(std::memory_order_relaxed); }

 private:
  const std::array<int64_t, N> bounds_;
  std::array<Count, N + 1> counts_{};
  Count total_{0};
};

constexpr std::array<int64_t, 5> kPostsPerItem{1, 2, 4, 8, 16};
constexpr int64_t kUs = 1'000, kMs = 1'000'000, kS = 1'000'000'000;
constexpr std::array<int64_t, 16> kStepNs{10 * kUs,  25 * kUs,   50 * kUs, 100 * kUs, 250 * kUs, 500 * kUs,
                                          1 * kMs,   2500 * kUs, 5 * kMs,  10 * kMs,  25 * kMs,  50 * kMs,
                                          100 * kMs, 250 * kMs,  1 * kS,   10 * kS};

// Rows by layer and local expert. Sized by the first link; what lies outside is not counted.
struct ExpertRows {
  ExpertRows(int64_t layer_count, int64_t expert_count)
      : layers(layer_count), experts(expert_count), rows(layer_count * expert_count) {}

  void count(int64_t layer, const int32_t* ids, int64_t length) {
    if (layer >= layers) return;
    Count* of_layer = rows.data() + layer * experts;
    for (int64_t index = 0; index < length; ++index) {
      if (ids[index] >= 0 && ids[index] < experts) add(of_layer[ids[index]], 1);
    }
  }

  const int64_t layers;
  const int64_t experts;
  std::vector<Count> rows;
};

struct Counters {
  Count steps{0};
  Count posts{0};  // answered
  Count rows{0};
  Count splits{0};  // items that were a part of a post, not its last one
  Count last_step_monotonic_ns{0};
  Count last_compute_ns{0};                              // of the last step with rows
  Count taken_at_ns{0};                                  // 0 while no item is being computed
  const int64_t made_at_ns = now_ns();                   // then the first wait begins
  Histogram<kStepNs.size()> wait{kStepNs};               // from the end of the step before to taking the item
  Histogram<kStepNs.size()> compute{kStepNs};            // from taking it to its result
  Histogram<kStepNs.size()> send{kStepNs};               // copies back and flags
  Histogram<kPostsPerItem.size()> parts{kPostsPerItem};  // posts, or parts of posts, in an item
  std::atomic<ExpertRows*> experts{nullptr};             // set once, owned below
  std::unique_ptr<ExpertRows> experts_owner;
  Recorder<StepSpan> spans;
};

}  // namespace ffn
