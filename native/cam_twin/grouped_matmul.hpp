// Quantized grouped matmul as the layered operators define it, on raw memory. Plain loops: it is to be right.
#pragma once

#include <cstdint>
#include <vector>

namespace cam_twin {

// Weights of all experts of one layer. int4: [experts, depth, width / 8], nibble j of a word is column 8n + j, signed.
// int8: [experts, depth, width].
struct Weights {
  const void* data;
  bool int4;
  int64_t experts, depth, width;
};

// One expert's output scales and what is added: float32 either way, [width].
struct Columns {
  std::vector<float> scale;
  std::vector<float> bias;        // int4: 8 * sum of weight * scale over the depth, added after the scale
  std::vector<int32_t> int_bias;  // int8: added to the accumulator; may be empty
};

// One expert's weights as int8 [depth, width].
std::vector<int8_t> unpacked(const Weights& weights, int64_t expert);

// x[depth] int8 with scale x_scale times one expert -> out[width] float32.
// int4 ("MSD"): x = 16 * hi + lo + 8; each half's integer sums times scale are rounded to float16, then
// (16 * hi + lo + bias) * x_scale. int8: (sum + bias) * scale * x_scale.
void multiply_row(const int8_t* x, float x_scale, const int8_t* weights, int64_t depth, bool int4,
                  const Columns& columns, float* out);

// silu(gate) * up of values[2 * inter], gate first; limit > 0 clamps gate above and up on both sides. Then int8 with
// scale = amax / 127: q = value * (1 / scale), rounded to float16 and from there to int8. A row of zeros has scale 0.
void swiglu_quantize(const float* values, int64_t inter, float limit, int8_t* q, float* scale);

}  // namespace cam_twin
