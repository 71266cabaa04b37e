#include "cam_twin/rows.hpp"

#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cam_twin/numbers.hpp"

namespace cam_twin {

namespace {

template <typename T>
void quantize(const T* x, int64_t hidden, int8_t* q, float* scale) {
  float amax = 0;
  for (int64_t i = 0; i < hidden; ++i) amax = std::fmax(amax, std::fabs(static_cast<float>(x[i])));
  if (amax == 0) {
    std::memset(q, 127, hidden);
    *scale = std::nanf("");
    return;
  }
  const float mul = 127.0F / amax;
  for (int64_t i = 0; i < hidden; ++i) q[i] = to_int8(static_cast<float>(x[i]) * mul);
  *scale = 1.0F / mul;
}

template <typename T>
void weighted_sum(const T* rows, const float* weights, int64_t top_k, int64_t hidden, T* out) {
  std::vector<float> sum(hidden, 0.0F);
  for (int64_t k = 0; k < top_k; ++k) {
    for (int64_t i = 0; i < hidden; ++i) sum[i] += weights[k] * static_cast<float>(rows[k * hidden + i]);
  }
  for (int64_t i = 0; i < hidden; ++i) out[i] = static_cast<T>(sum[i]);
}

// call(pointer) with `memory` as rows of `type`.
template <typename Call>
void typed(RowType type, const void* memory, Call call) {
  if (type == kHalf) {
    call(static_cast<const Half*>(memory));
  } else {
    call(static_cast<const BFloat16*>(memory));
  }
}

}  // namespace

void quantize_rows(RowType type, const void* x, int64_t count, int64_t hidden, int8_t* q, float* scales) {
  typed(type, x, [&](const auto* rows) {
    for (int64_t row = 0; row < count; ++row) {
      quantize(rows + row * hidden, hidden, q + row * hidden, scales + row);
    }
  });
}

void weighted_sums(RowType type, const void* rows, const float* weights, int64_t count, int64_t top_k, int64_t hidden,
                   void* out) {
  typed(type, rows, [&](const auto* from) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(from)>>;
    for (int64_t row = 0; row < count; ++row) {
      weighted_sum(from + row * top_k * hidden, weights + row * top_k, top_k, hidden,
                   static_cast<T*>(out) + row * hidden);
    }
  });
}

}  // namespace cam_twin
