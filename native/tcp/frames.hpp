// What travels over the connection of one (A rank, F rank) pair. ffn_faas/protocol/stream.py says the same in words.
#pragma once

#include <cstdint>

#include "shm/layout.hpp"

namespace ffn {

// A -> F. Behind it: ids i32 [rows, top_k], weights f32 [rows, top_k], hidden [rows, hidden_size] in the wire type.
struct PostHead {
  uint64_t flag;
  int32_t stage;
  int32_t layer;
  int32_t rows;
  int32_t zero;
};
static_assert(sizeof(PostHead) == 24, "part of the protocol");

// F -> A. Behind it: partial f32 [rows, hidden_size].
struct AnswerHead {
  uint64_t flag;
  int32_t stage;
  int32_t rows;
};
static_assert(sizeof(AnswerHead) == 16, "part of the protocol");

}  // namespace ffn
