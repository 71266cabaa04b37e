// f32 partial sums to the rows that Attention goes on with.
#pragma once

#include <cstdint>

#include "ffn_faas/attention_table.h"

namespace ffn {

constexpr int64_t dtype_size(int32_t dtype) { return dtype == FFN_F32 ? 4 : 2; }

// Rounds to nearest, ties to even; NaN stays NaN, overflow becomes infinity.
void store_row(const float* source, void* target, int64_t count, int32_t dtype);

void add_row(float* sum, const float* source, int64_t count);

}  // namespace ffn
