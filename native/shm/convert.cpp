#include "shm/convert.hpp"

#include <cstring>

// The build is for any x86-64; these loops are compiled twice and the CPU chooses when the module is loaded. That is
// before ThreadSanitizer can be called, which the compiler lets the choice do.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
#define FFN_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define FFN_WIDE
#endif

namespace ffn {
namespace {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Both without branches, so that the loops below vectorise.
inline uint16_t to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded);
}

inline uint16_t to_f16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  // Adding 0.5 lets the FPU shift and round a number below f16's normal range into the low bits.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  const uint32_t result = magnitude >= (143u << 23) ? special : finite;
  return static_cast<uint16_t>(result | (bits >> 16 & 0x8000));
}

FFN_WIDE void store_bf16(const float* source, uint16_t* target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) target[i] = to_bf16(source[i]);
}

FFN_WIDE void store_f16(const float* source, uint16_t* target, int64_t count) {
  for (int64_t i = 0; i < count; ++i) target[i] = to_f16(source[i]);
}

}  // namespace

void store_row(const float* source, void* target, int64_t count, int32_t dtype) {
  if (dtype == FFN_BF16) {
    store_bf16(source, static_cast<uint16_t*>(target), count);
  } else if (dtype == FFN_F16) {
    store_f16(source, static_cast<uint16_t*>(target), count);
  } else {
    std::memcpy(target, source, count * sizeof(float));
  }
}

FFN_WIDE void add_row(float* sum, const float* source, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] += source[i];
}

}  // namespace ffn
