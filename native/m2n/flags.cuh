// Flags of the windows. The word of post `sequence` of an epoch is (epoch << 40 | sequence) << kShareBits, compared for
// equality. A post of few rows is released by all blocks that wrote it: each adds a share, and together the shares are
// the step from one word to the next. So nobody waits for a last block, which would fence once more.
#pragma once

#include "m2n/ptx.cuh"

namespace ffn {

constexpr int kShareBits = 10;
constexpr uint64_t kPost = uint64_t{1} << kShareBits;  // between the words of two posts
constexpr int kMaxShares = 1 << kShareBits;
constexpr uint64_t kSequence = (uint64_t{1} << 40) - 1;

__host__ __device__ constexpr uint64_t flag_word(uint64_t flag) { return flag << kShareBits; }
__device__ __forceinline__ uint64_t sequence_of(uint64_t word) { return word >> kShareBits & kSequence; }

__device__ __forceinline__ bool is_first_post(uint64_t word) { return sequence_of(word) == 1; }

// Behind a fence that orders what this block wrote: its part of releasing `word`, or false where the last block has to
// store it. Shares add up only on top of the word before, and what a window held before its first post is not known.
__device__ __forceinline__ bool release_share(uint64_t* flag, uint64_t word, uint32_t block, uint32_t blocks) {
  if (blocks == 1) {
    store_relaxed_sys(flag, word);
    return true;
  }
  if (is_first_post(word)) return false;
  add_relaxed_sys(flag, block == 0 ? kPost - (blocks - 1) : 1);
  return true;
}

}  // namespace ffn
