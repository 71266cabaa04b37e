// What dispatch and combine do to rows of fp16 or bf16.
#pragma once

#include <cstdint>

#include "cam_twin/region.hpp"

namespace cam_twin {

// The dynamic quantization of dispatch: mul = 127 / amax, q = rint(x * mul), scale = 1 / mul. x [count, hidden]. A row
// of zeros is undefined there; here it is poisoned.
void quantize_rows(RowType type, const void* x, int64_t count, int64_t hidden, int8_t* q, float* scales);

// out[count, hidden] = sum over k, in order, of weights[count, top_k] * rows[count, top_k, hidden] in float32, rounded
// once.
void weighted_sums(RowType type, const void* rows, const float* weights, int64_t count, int64_t top_k, int64_t hidden,
                   void* out);

}  // namespace cam_twin
