// The two row types, as float32 and back with one rounding.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>

namespace cam_twin {

using Half = c10::Half;
using BFloat16 = c10::BFloat16;

// float32 -> int8 as the device casts: to the nearest, ties to even, saturated; NaN becomes 0.
inline int8_t to_int8(float value) {
  if (!(value == value)) return 0;
  const float rounded = __builtin_rintf(value);
  return static_cast<int8_t>(rounded > 127.0F ? 127.0F : (rounded < -128.0F ? -128.0F : rounded));
}

}  // namespace cam_twin
