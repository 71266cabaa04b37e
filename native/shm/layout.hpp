// Where everything lies in the arena of one (A rank, F rank) pair. ffn_faas/protocol/window.py tells the same in Python
// and says what each field means; a test holds the two equal.
#pragma once

#include <cstdint>

namespace ffn {

constexpr uint64_t kMagic = 0x31304e49574e4646;  // "FFNWIN01"
constexpr uint32_t kLayoutVersion = 1;
constexpr int64_t kAlignment = 128;
constexpr int kEpochShift = 40;
constexpr uint64_t kMaxEpoch = (uint64_t{1} << 24) - 1;
constexpr uint64_t kMaxSequence = (uint64_t{1} << kEpochShift) - 1;

constexpr uint64_t make_flag(uint64_t epoch, uint64_t sequence) { return epoch << kEpochShift | sequence; }

struct Geometry {
  int64_t stages;
  int64_t capacity;
  int64_t hidden_size;
  int64_t top_k;
  int64_t element_size;

  // Throws std::invalid_argument naming the field that is out of its range.
  void check() const;
  bool operator==(const Geometry& other) const;
};

// First bytes of the arena, written once by F before A maps it.
struct Header {
  uint64_t magic;
  uint32_t layout_version;
  uint32_t stages;
  uint64_t capacity;
  uint64_t hidden_size;
  uint64_t top_k;
  uint64_t element_size;
  uint64_t epoch;
  uint64_t nbytes;
};
static_assert(sizeof(Header) == 64, "the header's layout is part of the protocol");

struct Layout {
  explicit Layout(const Geometry& geometry);

  int64_t receiver_sleeping;  // u32
  int64_t first_stage;        // offset of stage 0
  int64_t stage_stride;       // bytes from one stage to the next
  // Offsets from the start of a stage:
  int64_t dispatch_flag;     // u64
  int64_t dispatch_layer;    // i32, rows i32 right behind it
  int64_t dispatch_ids;      // i32 [capacity, top_k]
  int64_t dispatch_weights;  // f32 [capacity, top_k]
  int64_t dispatch_hidden;   // [capacity, hidden_size] of element_size bytes
  int64_t combine_flag;      // u64
  int64_t combine_sleeping;  // u32
  int64_t combine_partial;   // f32 [capacity, hidden_size]
  int64_t nbytes;

  int64_t stage(int64_t index) const { return first_stage + index * stage_stride; }
};

}  // namespace ffn
