// The rows of one chunk of a batch: which go to which F rank, and the sum of what comes back.
#pragma once

#include <cstdint>
#include <vector>

#include "ffn_faas/attention_table.h"
#include "shm/arena.hpp"

namespace ffn {

// Throws std::invalid_argument naming the first id that is neither -1 nor below experts.
void check_ids(const ffn_attention_call& call, int64_t experts);

// Writes rows begin ... end that need an expert of [first, last) into the dispatch window of call.stage, with local ids
// and weights; sent becomes their numbers, counted from begin, ascending.
void fill_window(const ffn_attention_call& call, const Arena& arena, int64_t first, int64_t last, int64_t begin,
                 int64_t end, std::vector<int32_t>& sent);

// Rows begin ... end of out: the sum, in rank order, of the partial rows of the F ranks that were sent the row.
void sum_partials(const ffn_attention_call& call, const std::vector<const Arena*>& arenas,
                  const std::vector<std::vector<int32_t>>& sent, int64_t begin, int64_t end, void* out);

}  // namespace ffn
