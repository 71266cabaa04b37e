// AVX512F: weights widened to f32 on the way into registers, f32 multiply-adds.
#include "experts_cpu/path.hpp"

#if defined(__AVX512F__)
#include <immintrin.h>

namespace ffn::cpu {
namespace {

// How a line (16 columns of k and k + 1) becomes two vectors.
struct Bf16 {
  static constexpr int64_t kLine = 64;
  static inline void load(const char* line, __m512& k0, __m512& k1) {
    const __m512i raw = _mm512_load_si512(line);
    k0 = _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16));
    k1 = _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static inline __m512 widen(const void* source, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half(source, mask)), 16));
  }
  static inline __m256i half(const void* source, __mmask16 mask) {
    if (mask == 0xffff) return _mm256_loadu_si256(static_cast<const __m256i*>(source));
    alignas(32) uint16_t copy[16] = {};
    for (int i = 0; i < 16; ++i) {
      if (mask >> i & 1) copy[i] = static_cast<const uint16_t*>(source)[i];
    }
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(copy));
  }
};

struct F16 {
  static constexpr int64_t kLine = 64;
  static inline void load(const char* line, __m512& k0, __m512& k1) {
    k0 = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(line)));
    k1 = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(line + 32)));
  }
  static inline __m512 widen(const void* source, __mmask16 mask) { return _mm512_cvtph_ps(Bf16::half(source, mask)); }
};

struct F32 {
  static constexpr int64_t kLine = 128;
  static inline void load(const char* line, __m512& k0, __m512& k1) {
    k0 = _mm512_load_ps(line);
    k1 = _mm512_load_ps(line + 64);
  }
  static inline __m512 widen(const void* source, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, source); }
};

template <class Weight, int M>
inline __attribute__((always_inline)) void multiply(const void* panel, int64_t pairs, const void* activations,
                                                    const void* next, __m512 (&sum)[M][2]) {
  const char* line = static_cast<const char*>(panel);
  const char* ahead = static_cast<const char*>(next);
  const float* x = static_cast<const float*>(activations);
#pragma GCC unroll 16
  for (int r = 0; r < M; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  for (; pairs > 0; pairs -= kChunk / 2, x += M * kChunk) {
    const int64_t count = pairs < kChunk / 2 ? pairs : kChunk / 2;
    for (int64_t i = 0; i < count; ++i) {
      __m512 left0, left1, right0, right1;
      Weight::load(line, left0, left1);
      Weight::load(line + Weight::kLine, right0, right1);
      _mm_prefetch(ahead, _MM_HINT_T1);
      _mm_prefetch(ahead + 64, _MM_HINT_T1);
      line += 2 * Weight::kLine;
      ahead += 128;
#pragma GCC unroll 16
      for (int r = 0; r < M; ++r) {
        const __m512 value = _mm512_set1_ps(x[r * kChunk + 2 * i]);
        sum[r][0] = _mm512_fmadd_ps(left0, value, sum[r][0]);
        sum[r][1] = _mm512_fmadd_ps(right0, value, sum[r][1]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < M; ++r) {
        const __m512 value = _mm512_set1_ps(x[r * kChunk + 2 * i + 1]);
        sum[r][0] = _mm512_fmadd_ps(left1, value, sum[r][0]);
        sum[r][1] = _mm512_fmadd_ps(right1, value, sum[r][1]);
      }
    }
  }
}

inline __m512 exp_of(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-100.0f), _mm512_min_ps(_mm512_set1_ps(100.0f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

inline __m512 swiglu(__m512 gate, __m512 up) {
  const __m512 minus = _mm512_sub_ps(_mm512_setzero_ps(), gate);
  return _mm512_mul_ps(_mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), exp_of(minus))), up);
}

inline __mmask16 first_columns(int64_t count) {
  return count >= kColumns ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

template <class Weight, int M>
void gate_up(const void* panel, int64_t pairs, const void* x, void* activations, int64_t valid, const void* next) {
  __m512 sum[M][2];
  multiply<Weight, M>(panel, pairs, x, next, sum);
  auto* out = static_cast<float*>(activations);
  const __mmask16 mask = first_columns(valid);
#pragma GCC unroll 16
  for (int r = 0; r < M; ++r) {
    _mm512_storeu_ps(out + r * kChunk, _mm512_maskz_mov_ps(mask, swiglu(sum[r][0], sum[r][1])));
  }
}

template <class Weight, int M>
void down(const void* panel, int64_t pairs, const void* activations, const Target& target, const void* next) {
  __m512 sum[M][2];
  multiply<Weight, M>(panel, pairs, activations, next, sum);
  const __mmask16 left = first_columns(target.columns), right = first_columns(target.columns - kColumns);
#pragma GCC unroll 16
  for (int r = 0; r < M; ++r) {
    float* out = target.out + target.rows[r] * target.stride;
    const __m512 scale = _mm512_set1_ps(target.scale[r]);
    __m512 a = _mm512_setzero_ps(), b = _mm512_setzero_ps();
    if (!target.first[r]) {
      a = _mm512_maskz_loadu_ps(left, out);
      b = _mm512_maskz_loadu_ps(right, out + kColumns);
    }
    _mm512_mask_storeu_ps(out, left, _mm512_fmadd_ps(scale, sum[r][0], a));
    _mm512_mask_storeu_ps(out + kColumns, right, _mm512_fmadd_ps(scale, sum[r][1], b));
  }
}

template <class Weight, int64_t Size>
void gather(const void* hidden, int64_t stride, const int64_t* rows, int count, void* x) {
  auto* out = static_cast<float*>(x);
  for (int r = 0; r < count; ++r) {
    const char* row = static_cast<const char*>(hidden) + rows[r] * stride * Size;
    for (int64_t k = 0, left = stride; left > 0; k += kChunk, left -= kChunk) {
      _mm512_storeu_ps(out + k * count + r * kChunk, Weight::widen(row + k * Size, first_columns(left)));
    }
  }
}

template <class Weight>
void widen(const void* panel, int64_t pairs, float* wide) {
  const char* line = static_cast<const char*>(panel);
  for (int64_t i = 0; i < 2 * pairs; ++i, line += Weight::kLine, wide += 2 * kColumns) {
    __m512 k0, k1;
    Weight::load(line, k0, k1);
    _mm512_store_ps(wide, k0);
    _mm512_store_ps(wide + kColumns, k1);
  }
}

int64_t peak(int64_t rounds) {
  constexpr int kSums = 24;
  __m512 sum[kSums];
  for (auto& value : sum) value = _mm512_setzero_ps();
  __m512 a = _mm512_set1_ps(1e-3f), b = _mm512_set1_ps(0.5f);
  for (int64_t i = 0; i < rounds; ++i) {
    asm volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 24
    for (int j = 0; j < kSums; ++j) sum[j] = _mm512_fmadd_ps(a, b, sum[j]);
  }
  for (auto& value : sum) asm volatile("" : : "v"(value));
  return rounds * kSums * 16 * 2;
}

uint64_t read(const void* memory, int64_t nbytes) {
  const char* from = static_cast<const char*>(memory);
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (int64_t i = 0; i + 256 <= nbytes; i += 256) {
    a = _mm512_or_si512(a, _mm512_loadu_si512(from + i));
    b = _mm512_or_si512(b, _mm512_loadu_si512(from + i + 64));
    c = _mm512_or_si512(c, _mm512_loadu_si512(from + i + 128));
    d = _mm512_or_si512(d, _mm512_loadu_si512(from + i + 192));
  }
  a = _mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d));
  return static_cast<uint64_t>(_mm512_reduce_or_epi64(a));
}

constexpr int kRows = 12;  // 24 sums, two widened lines, their raw form, one row's value: 32 registers

template <class Weight, int64_t Size>
Path make(Type type, const Path* wide) {
  Path path{};
  path.name = "avx512";
  path.type = type;
  path.max_rows = kRows;
  path.activation_size = sizeof(float);
  path.gather = &gather<Weight, Size>;
  path.widen = wide ? &widen<Weight> : nullptr;
  path.wide = wide;
  path.peak = &peak;
  path.read = &read;
#define FFN_ROWS(m)                            \
  path.gate_up[(m) - 1] = &gate_up<Weight, m>; \
  path.down[(m) - 1] = &down<Weight, m>;
  FFN_ROWS(1)
  FFN_ROWS(2) FFN_ROWS(3) FFN_ROWS(4) FFN_ROWS(5) FFN_ROWS(6) FFN_ROWS(7) FFN_ROWS(8) FFN_ROWS(9) FFN_ROWS(10)
      FFN_ROWS(11) FFN_ROWS(12)
#undef FFN_ROWS
          return path;
}

}  // namespace

const Path* avx512_path(Type type) {
  static const Path f32 = make<F32, 4>(Type::f32, nullptr);
  static const Path f16 = make<F16, 2>(Type::f16, &f32);
  static const Path bf16 = make<Bf16, 2>(Type::bf16, &f32);
  return type == Type::f32 ? &f32 : type == Type::f16 ? &f16 : &bf16;
}

}  // namespace ffn::cpu
#else
namespace ffn::cpu {
const Path* avx512_path(Type) { return nullptr; }
}  // namespace ffn::cpu
#endif
