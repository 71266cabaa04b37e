// Plain C++: what every other path is tested against, and what other CPUs run.
#include <math.h>
#include <string.h>

#include "experts_cpu/path.hpp"

namespace ffn::cpu {
namespace {

float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

struct Bf16 {
  using Element = uint16_t;
  static float widen(Element value) { return float_of(static_cast<uint32_t>(value) << 16); }
  static int64_t place(int64_t column, int64_t k) { return column * 2 + k; }
};

struct F16 {
  using Element = uint16_t;
  static float widen(Element value) {
    const uint32_t sign = static_cast<uint32_t>(value & 0x8000) << 16, magnitude = value & 0x7fff;
    if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    // The exponent's new bias by a multiplication, which is exact for subnormal numbers too.
    return float_of(sign | magnitude << 13) * 0x1p112f;
  }
  static int64_t place(int64_t column, int64_t k) { return k * kColumns + column; }
};

struct F32 {
  using Element = float;
  static float widen(Element value) { return value; }
  static int64_t place(int64_t column, int64_t k) { return k * kColumns + column; }
};

template <class Weight, int M>
void multiply(const void* panel, int64_t pairs, const void* activations, float (&sum)[M][2 * kColumns]) {
  const auto* line = static_cast<const typename Weight::Element*>(panel);
  const auto* x = static_cast<const float*>(activations);
  memset(sum, 0, sizeof(sum));
  for (int64_t pair = 0; pair < pairs; ++pair, line += 4 * kColumns) {
    for (int64_t k = 0; k < 2; ++k) {
      float weight[2 * kColumns];
      for (int64_t c = 0; c < kColumns; ++c) {
        weight[c] = Weight::widen(line[Weight::place(c, k)]);
        weight[kColumns + c] = Weight::widen(line[2 * kColumns + Weight::place(c, k)]);
      }
      const int64_t at = 2 * pair + k;
      for (int r = 0; r < M; ++r) {
        const float value = x[at / kChunk * M * kChunk + r * kChunk + at % kChunk];
        for (int64_t c = 0; c < 2 * kColumns; ++c) sum[r][c] += weight[c] * value;
      }
    }
  }
}

template <class Weight, int M>
void gate_up(const void* panel, int64_t pairs, const void* x, void* activations, int64_t valid, Ahead) {
  float sum[M][2 * kColumns];
  multiply<Weight, M>(panel, pairs, x, sum);
  auto* out = static_cast<float*>(activations);
  for (int r = 0; r < M; ++r) {
    for (int64_t c = 0; c < kColumns; ++c) {
      const float gate = sum[r][c], up = sum[r][kColumns + c];
      out[r * kChunk + c] = c < valid ? gate / (1.0f + expf(-gate)) * up : 0.0f;
    }
  }
}

template <class Weight, int M>
void down(const void* panel, int64_t pairs, const void* activations, const Target& target, Ahead) {
  float sum[M][2 * kColumns];
  multiply<Weight, M>(panel, pairs, activations, sum);
  for (int r = 0; r < M; ++r) {
    float* out = target.out + target.rows[r] * target.stride;
    for (int64_t c = 0; c < target.columns; ++c) {
      out[c] = (target.first[r] ? 0.0f : out[c]) + target.scale[r] * sum[r][c];
    }
  }
}

template <class Weight>
void gather(const void* hidden, int64_t stride, const int64_t* rows, int count, void* x) {
  auto* out = static_cast<float*>(x);
  for (int r = 0; r < count; ++r) {
    const auto* row = static_cast<const typename Weight::Element*>(hidden) + rows[r] * stride;
    for (int64_t k = 0; k < ceil_div(stride, kChunk) * kChunk; ++k) {
      out[k / kChunk * count * kChunk + r * kChunk + k % kChunk] = k < stride ? Weight::widen(row[k]) : 0.0f;
    }
  }
}

int64_t peak(int64_t rounds) {
  float sum[32] = {};
  volatile float factor = 1e-3f;
  for (int64_t i = 0; i < rounds; ++i) {
    const float value = factor;
    for (float& element : sum) element += value * 0.5f;
  }
  for (float element : sum) factor = element;
  return rounds * 32 * 2;
}

uint64_t read(const void* memory, int64_t nbytes) {
  const auto* from = static_cast<const uint64_t*>(memory);
  uint64_t words[4] = {};
  for (int64_t i = 0; i + 4 <= nbytes / 8; i += 4) {
    for (int j = 0; j < 4; ++j) words[j] |= from[i + j];
  }
  return words[0] | words[1] | words[2] | words[3];
}

template <class Weight>
Path make(Type type) {
  Path path{};
  path.name = "scalar";
  path.type = type;
  path.max_rows = 4;
  path.activation_size = sizeof(float);
  path.chunk = kChunk;
  path.gather = &gather<Weight>;
  path.peak = &peak;
  path.read = &read;
#define FFN_ROWS(m)                            \
  path.gate_up[(m) - 1] = &gate_up<Weight, m>; \
  path.down[(m) - 1] = &down<Weight, m>
  FFN_ROWS(1);
  FFN_ROWS(2);
  FFN_ROWS(3);
  FFN_ROWS(4);
#undef FFN_ROWS
  return path;
}

}  // namespace

const Path* scalar_path(Type type) {
  static const Path f32 = make<F32>(Type::f32);
  static const Path f16 = make<F16>(Type::f16);
  static const Path bf16 = make<Bf16>(Type::bf16);
  return type == Type::f32 ? &f32 : type == Type::f16 ? &f16 : &bf16;
}

}  // namespace ffn::cpu
