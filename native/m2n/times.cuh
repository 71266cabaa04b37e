// Times of the last items and posts, kept in device memory by the kernels: a few local stores each, always on, so that
// no graph is captured again for them. Nanoseconds of %globaltimer. The host copies a ring while kernels go on.
#pragma once

#include <cstdint>

namespace ffn {

constexpr int kKeptTimes = 8192;

// On F, one item. The step before says when the wait began.
struct ItemTimes {
  uint64_t number;  // of the item, from 1
  uint64_t taken;
  uint64_t sorted;
  uint64_t computed;
  uint64_t sent;
  int32_t layer, rows, parts, unused;
};

// On A, one post.
struct PostTimes {
  uint64_t number;  // of the post of this stage, from 1
  uint64_t dispatching;
  uint64_t dispatched;
  uint64_t waiting;
  uint64_t answered;
  uint64_t summed;
  int32_t layer, rows;
};

// Entry n - 1 modulo kKeptTimes is number n; that of number `ended` + 1 may be half written.
template <typename Times>
struct TimesRing {
  uint64_t ended;  // number of the newest that is whole
  Times kept[kKeptTimes];

  __device__ Times& entry(uint64_t number) { return kept[(number - 1) % kKeptTimes]; }
};

}  // namespace ffn
