#include "cam_twin/grouped_matmul.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cam_twin/numbers.hpp"

namespace cam_twin {

namespace {

void accumulate(const int8_t* x, const int8_t* weights, int64_t depth, int64_t width, std::vector<int32_t>* sums) {
  sums->assign(width, 0);
  int32_t* sum = sums->data();
  for (int64_t k = 0; k < depth; ++k) {
    const int32_t factor = x[k];
    const int8_t* row = weights + k * width;
    for (int64_t n = 0; n < width; ++n) sum[n] += factor * row[n];
  }
}

float in_half(float value) { return static_cast<float>(Half(value)); }

}  // namespace

std::vector<int8_t> unpacked(const Weights& w, int64_t expert) {
  const int64_t size = w.depth * w.width;
  std::vector<int8_t> values(size);
  if (!w.int4) {
    std::memcpy(values.data(), static_cast<const int8_t*>(w.data) + expert * size, size);
    return values;
  }
  const uint32_t* words = static_cast<const uint32_t*>(w.data) + expert * size / 8;
  for (int64_t i = 0; i < size; ++i) {
    const auto nibble = static_cast<int32_t>(words[i / 8] >> (4 * (i % 8)) & 15);
    values[i] = static_cast<int8_t>((nibble ^ 8) - 8);
  }
  return values;
}

void multiply_row(const int8_t* x, float x_scale, const int8_t* weights, int64_t depth, bool int4,
                  const Columns& columns, float* out) {
  const auto width = static_cast<int64_t>(columns.scale.size());
  std::vector<int32_t> sums;
  if (!int4) {
    accumulate(x, weights, depth, width, &sums);
    for (int64_t n = 0; n < width; ++n) {
      const int32_t sum = sums[n] + (columns.int_bias.empty() ? 0 : columns.int_bias[n]);
      out[n] = static_cast<float>(sum) * columns.scale[n] * x_scale;
    }
    return;
  }
  std::vector<int8_t> high(depth);
  std::vector<int8_t> low(depth);
  for (int64_t k = 0; k < depth; ++k) {
    high[k] = static_cast<int8_t>(x[k] >> 4);  // rounds down, also below zero
    low[k] = static_cast<int8_t>((x[k] & 15) - 8);
  }
  std::vector<int32_t> low_sums;
  accumulate(high.data(), weights, depth, width, &sums);
  accumulate(low.data(), weights, depth, width, &low_sums);
  for (int64_t n = 0; n < width; ++n) {
    const float hi = in_half(static_cast<float>(sums[n]) * columns.scale[n]);
    const float lo = in_half(static_cast<float>(low_sums[n]) * columns.scale[n]);
    out[n] = (16.0F * hi + lo + columns.bias[n]) * x_scale;
  }
}

void swiglu_quantize(const float* values, int64_t inter, float limit, int8_t* q, float* scale) {
  std::vector<float> row(inter);
  float amax = 0;
  for (int64_t i = 0; i < inter; ++i) {
    float gate = values[i];
    float up = values[inter + i];
    if (limit > 0) {
      gate = std::min(gate, limit);
      up = std::max(-limit, std::min(up, limit));
    }
    // In double, so that the result is the rounded one whatever the exponential of the platform.
    const double silu = static_cast<double>(gate) / (1.0 + std::exp(-static_cast<double>(gate)));
    row[i] = static_cast<float>(silu) * up;
    amax = std::fmax(amax, std::fabs(row[i]));
  }
  *scale = amax / 127.0F;
  const float factor = amax == 0 ? 0 : 1.0F / *scale;
  bool finite = true;
  for (int64_t i = 0; i < inter; ++i) {
    finite = finite && row[i] == row[i];
    q[i] = to_int8(in_half(row[i] * factor));
  }
  if (!finite) *scale = std::nanf("");
}

}  // namespace cam_twin
