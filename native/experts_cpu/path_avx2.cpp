// AVX2 with FMA and F16C: as the AVX512 path, with 16 registers of 8 values.
#include "experts_cpu/path.hpp"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

namespace ffn::cpu {
namespace {

inline __m128i load8(const void* source) { return _mm_loadu_si128(static_cast<const __m128i*>(source)); }

alignas(32) constexpr uint32_t kUpperHalf[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                                0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};

// How 8 columns (part 0 or 1 of a line) of k, or of k + 1 (`odd`), become a vector, where there is a `spare` register
// or none; and how 8 elements of a row do.
struct Bf16 {
  using Element = uint16_t;
  static constexpr int64_t kLine = 64;
  static inline __m256 load(const char* line, int part, int odd, bool spare) {
    __m256i raw = _mm256_load_si256(reinterpret_cast<const __m256i*>(line + 32 * part));
    if (!odd) return _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16));
    if (spare) return _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
    asm("vpand %1, %0, %0" : "+x"(raw) : "m"(kUpperHalf));
    return _mm256_castsi256_ps(raw);
  }
  static inline __m256 widen(const void* source) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load8(source)), 16));
  }
};

struct F16 {
  using Element = uint16_t;
  static constexpr int64_t kLine = 64;
  static inline __m256 load(const char* line, int part, int odd, bool) {
    return _mm256_cvtph_ps(load8(line + 32 * odd + 16 * part));
  }
  static inline __m256 widen(const void* source) { return _mm256_cvtph_ps(load8(source)); }
};

struct F32 {
  using Element = float;
  static constexpr int64_t kLine = 128;
  static inline __m256 load(const char* line, int part, int odd, bool) {
    return _mm256_load_ps(reinterpret_cast<const float*>(line) + 16 * odd + 8 * part);
  }
  static inline __m256 widen(const void* source) { return _mm256_loadu_ps(static_cast<const float*>(source)); }
};

// All rows of one k, or of k and k + 1: V = 4 is all 32 columns, sum[r] = left 0-7, left 8-15, right 0-7, right 8-15;
// V = 2 is 8 columns of each half, of `part`. The rows of the latter are so many that a k's weights are held, and the
// rows' values pass by: then all sums stay in registers.
template <class Weight, int M, int V>
inline __attribute__((always_inline)) void multiply_pair(const char* line, const float* x, int part,
                                                         __m256 (&sum)[M][V]) {
  if constexpr (V == 4) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const __m256 k0 = Weight::load(line + v / 2 * Weight::kLine, v % 2, 0, true);
      const __m256 k1 = Weight::load(line + v / 2 * Weight::kLine, v % 2, 1, true);
#pragma GCC unroll 4
      for (int r = 0; r < M; ++r) {
        sum[r][v] = _mm256_fmadd_ps(k0, _mm256_broadcast_ss(x + r * kChunk), sum[r][v]);
        sum[r][v] = _mm256_fmadd_ps(k1, _mm256_broadcast_ss(x + r * kChunk + 1), sum[r][v]);
      }
    }
  } else {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      const __m256 left = Weight::load(line, part, odd, false);
      const __m256 right = Weight::load(line + Weight::kLine, part, odd, false);
#pragma GCC unroll 8
      for (int r = 0; r < M; ++r) {
        const __m256 value = _mm256_broadcast_ss(x + r * kChunk + odd);
        sum[r][0] = _mm256_fmadd_ps(left, value, sum[r][0]);
        sum[r][1] = _mm256_fmadd_ps(right, value, sum[r][1]);
      }
    }
  }
}

template <class Weight, int M, int V>
inline __attribute__((always_inline)) void multiply(const void* panel, int64_t pairs, const void* activations,
                                                    Ahead ahead, int part, __m256 (&sum)[M][V]) {
  const char* line = static_cast<const char*>(panel);
  const float* x = static_cast<const float*>(activations);
  for (; pairs > 0; pairs -= kChunk / 2, x += M * kChunk) {
    const int64_t count = pairs < kChunk / 2 ? pairs : kChunk / 2;
    for (int64_t i = 0; i < count; ++i) {
      _mm_prefetch(ahead.at, _MM_HINT_T1);
      _mm_prefetch(ahead.at + 64, _MM_HINT_T1);
      ahead.at += ahead.step;
      multiply_pair<Weight, M, V>(line, x + 2 * i, part, sum);
      line += 2 * Weight::kLine;
    }
  }
}

template <int M, int V>
inline __attribute__((always_inline)) void zero(__m256 (&sum)[M][V]) {
#pragma GCC unroll 8
  for (int r = 0; r < M; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[r][v] = _mm256_setzero_ps();
  }
}

inline __m256 exp_of(__m256 x) {
  x = _mm256_max_ps(_mm256_set1_ps(-87.0f), _mm256_min_ps(_mm256_set1_ps(87.0f), x));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)), 8);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.9875691500e-4f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
  p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

inline __m256 swiglu(__m256 gate, __m256 up) {
  const __m256 minus = _mm256_sub_ps(_mm256_setzero_ps(), gate);
  return _mm256_mul_ps(_mm256_div_ps(gate, _mm256_add_ps(_mm256_set1_ps(1.0f), exp_of(minus))), up);
}

// Columns that do not exist are exact zeros, whatever stood in the row.
inline void clear_columns(float* out, int count, int64_t valid) {
  for (int r = 0; valid < kColumns && r < count; ++r) {
    for (int64_t c = valid; c < kColumns; ++c) out[r * kChunk + c] = 0.0f;
  }
}

constexpr bool few(int rows) { return rows <= 3; }

// out[0, count) (+)= scale * y for 8 columns, of which `count` exist.
inline void add(float* out, int64_t count, float scale, bool store, __m256 y) {
  const __m256 factor = _mm256_set1_ps(scale);
  if (count >= 8) {
    _mm256_storeu_ps(out, _mm256_fmadd_ps(factor, y, store ? _mm256_setzero_ps() : _mm256_loadu_ps(out)));
    return;
  }
  alignas(32) float copy[8] = {};
  for (int64_t c = 0; !store && c < count; ++c) copy[c] = out[c];
  _mm256_store_ps(copy, _mm256_fmadd_ps(factor, y, _mm256_load_ps(copy)));
  for (int64_t c = 0; c < count; ++c) out[c] = copy[c];
}

// Not inlined: beside other code the compiler finds no register for every sum.
template <class Weight, int M>
__attribute__((noinline)) void accumulate(const void* panel, int64_t pairs, const void* x, float* sums, bool start,
                                          Ahead ahead) {
  for (int part = 0; part < 2; ++part) {
    __m256 sum[M][2];
    zero<M, 2>(sum);
    for (int r = 0; !start && r < M; ++r) {
      sum[r][0] = _mm256_load_ps(sums + r * 2 * kColumns + 8 * part);
      sum[r][1] = _mm256_load_ps(sums + r * 2 * kColumns + kColumns + 8 * part);
    }
    multiply<Weight, M, 2>(panel, pairs, x, ahead.part(part, 2, pairs), part, sum);
#pragma GCC unroll 8
    for (int r = 0; r < M; ++r) {
      _mm256_store_ps(sums + r * 2 * kColumns + 8 * part, sum[r][0]);
      _mm256_store_ps(sums + r * 2 * kColumns + kColumns + 8 * part, sum[r][1]);
    }
  }
}

void finish_gate_up(const float* sums, int count, void* activations, int64_t valid) {
  auto* out = static_cast<float*>(activations);
  for (int r = 0; r < count; ++r, sums += 2 * kColumns) {
    for (int part = 0; part < 2; ++part) {
      const __m256 gate = _mm256_load_ps(sums + 8 * part), up = _mm256_load_ps(sums + kColumns + 8 * part);
      _mm256_storeu_ps(out + r * kChunk + 8 * part, swiglu(gate, up));
    }
  }
  clear_columns(out, count, valid);
}

void finish_down(const float* sums, int count, const Target& target) {
  for (int r = 0; r < count; ++r, sums += 2 * kColumns) {
    float* out = target.out + target.rows[r] * target.stride;
    for (int64_t column = 0; column < 2 * kColumns; column += 8) {
      add(out + column, target.columns - column, target.scale[r], target.first[r], _mm256_load_ps(sums + column));
    }
  }
}

template <class Weight, int M>
void gate_up(const void* panel, int64_t pairs, const void* x, void* activations, int64_t valid, Ahead ahead) {
  auto* out = static_cast<float*>(activations);
  if constexpr (few(M)) {
    __m256 sum[M][4];
    zero<M, 4>(sum);
    multiply<Weight, M, 4>(panel, pairs, x, ahead, 0, sum);
#pragma GCC unroll 4
    for (int r = 0; r < M; ++r) {
      _mm256_storeu_ps(out + r * kChunk, swiglu(sum[r][0], sum[r][2]));
      _mm256_storeu_ps(out + r * kChunk + 8, swiglu(sum[r][1], sum[r][3]));
    }
    clear_columns(out, M, valid);
  } else {
    alignas(32) float sums[M * 2 * kColumns];
    accumulate<Weight, M>(panel, pairs, x, sums, true, ahead);
    finish_gate_up(sums, M, activations, valid);
  }
}

template <class Weight, int M>
void down(const void* panel, int64_t pairs, const void* activations, const Target& target, Ahead ahead) {
  if constexpr (few(M)) {
    __m256 sum[M][4];
    zero<M, 4>(sum);
    multiply<Weight, M, 4>(panel, pairs, activations, ahead, 0, sum);
#pragma GCC unroll 4
    for (int r = 0; r < M; ++r) {
      float* out = target.out + target.rows[r] * target.stride;
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        add(out + 8 * v, target.columns - 8 * v, target.scale[r], target.first[r], sum[r][v]);
      }
    }
  } else {
    alignas(32) float sums[M * 2 * kColumns];
    accumulate<Weight, M>(panel, pairs, activations, sums, true, ahead);
    finish_down(sums, M, target);
  }
}

template <class Weight>
void gather(const void* hidden, int64_t stride, const int64_t* rows, int count, void* x) {
  using Element = typename Weight::Element;
  auto* out = static_cast<float*>(x);
  for (int r = 0; r < count; ++r) {
    const Element* row = static_cast<const Element*>(hidden) + rows[r] * stride;
    for (int64_t k = 0; k < stride; k += kChunk) {
      float* to = out + k * count + r * kChunk;
      Element copy[kChunk] = {};
      const Element* from = row + k;
      if (stride - k < kChunk) {
        for (int64_t c = 0; c < stride - k; ++c) copy[c] = from[c];
        from = copy;
      }
      _mm256_storeu_ps(to, Weight::widen(from));
      _mm256_storeu_ps(to + 8, Weight::widen(from + 8));
    }
  }
}

int64_t peak(int64_t rounds) {
  constexpr int kSums = 12;
  __m256 sum[kSums];
  for (auto& value : sum) value = _mm256_setzero_ps();
  __m256 a = _mm256_set1_ps(1e-3f), b = _mm256_set1_ps(0.5f);
  for (int64_t i = 0; i < rounds; ++i) {
    asm volatile("" : "+x"(a), "+x"(b));
#pragma GCC unroll 12
    for (int j = 0; j < kSums; ++j) sum[j] = _mm256_fmadd_ps(a, b, sum[j]);
  }
  for (auto& value : sum) asm volatile("" : : "x"(value));
  return rounds * kSums * 8 * 2;
}

uint64_t read(const void* memory, int64_t nbytes) {
  const auto* from = static_cast<const __m256i*>(memory);
  __m256i a = _mm256_setzero_si256(), b = a;
  for (int64_t i = 0; i + 64 <= nbytes; i += 64, from += 2) {
    a = _mm256_or_si256(a, _mm256_loadu_si256(from));
    b = _mm256_or_si256(b, _mm256_loadu_si256(from + 1));
  }
  alignas(32) uint64_t words[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(words), _mm256_or_si256(a, b));
  return words[0] | words[1] | words[2] | words[3];
}

template <class Weight>
Path make(Type type) {
  Path path{};
  path.name = "avx2";
  path.type = type;
  path.max_rows = 6;
  path.activation_size = sizeof(float);
  path.chunk = kChunk;
  path.gather = &gather<Weight>;
  path.finish_gate_up = &finish_gate_up;
  path.finish_down = &finish_down;
  path.peak = &peak;
  path.read = &read;
#define FFN_ROWS(m)                            \
  path.gate_up[(m) - 1] = &gate_up<Weight, m>; \
  path.down[(m) - 1] = &down<Weight, m>;       \
  path.accumulate[(m) - 1] = &accumulate<Weight, m>
  FFN_ROWS(1);
  FFN_ROWS(2);
  FFN_ROWS(3);
  FFN_ROWS(4);
  FFN_ROWS(5);
  FFN_ROWS(6);
#undef FFN_ROWS
  return path;
}

}  // namespace

const Path* avx2_path(Type type) {
  static const Path f32 = make<F32>(Type::f32);
  static const Path f16 = make<F16>(Type::f16);
  static const Path bf16 = make<Bf16>(Type::bf16);
  return type == Type::f32 ? &f32 : type == Type::f16 ? &f16 : &bf16;
}

}  // namespace ffn::cpu
#else
namespace ffn::cpu {
const Path* avx2_path(Type) { return nullptr; }
}  // namespace ffn::cpu
#endif
