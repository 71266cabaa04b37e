// AVX512F: weights widened to f32 on the way into registers, f32 multiply-adds.
#include "experts_cpu/path.hpp"

#if defined(__AVX512F__)
#include "experts_cpu/avx512_math.hpp"

namespace ffn::cpu {
namespace {

// How a line (16 columns of k and k + 1) becomes two vectors.
struct Bf16 {
  static constexpr int64_t kLine = 64;
  using Raw = __m512i;
  static inline Raw load(const char* line) { return _mm512_load_si512(line); }
  static inline __m512 even(const char*, Raw raw) { return _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16)); }
  static inline __m512 odd(const char*, Raw raw) {
    return _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static inline __m512 widen(const void* source, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half(source, mask)), 16));
  }
  static inline __m256i half(const void* source, __mmask16 mask) { return _mm256_maskz_loadu_epi16(mask, source); }
};

struct F16 {
  static constexpr int64_t kLine = 64;
  using Raw = int;
  static inline Raw load(const char*) { return 0; }
  static inline __m512 even(const char* line, Raw) { return at(line); }
  static inline __m512 odd(const char* line, Raw) { return at(line + 32); }
  static inline __m512 at(const char* half) {
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(half)));
  }
  static inline __m512 widen(const void* source, __mmask16 mask) { return _mm512_cvtph_ps(Bf16::half(source, mask)); }
};

struct F32 {
  static constexpr int64_t kLine = 128;
  using Raw = int;
  static inline Raw load(const char*) { return 0; }
  static inline __m512 even(const char* line, Raw) { return _mm512_load_ps(line); }
  static inline __m512 odd(const char* line, Raw) { return _mm512_load_ps(line + 64); }
  static inline __m512 widen(const void* source, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, source); }
};

// sum += a * b. As an instruction: left to itself the compiler sums into other registers, and then moves and spills.
inline __attribute__((always_inline)) void add_product(__m512& sum, __m512 a, __m512 b) {
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

// Adds `pairs` pairs of k of a panel to the sums of M rows. Each value is loaded once for both multiply-adds: reading
// it twice as their memory operand takes fewer instructions and is slower, since a load then ties up a multiplier's
// slot. k is not cut for many rows: rows and panel come from L2 at the pace of the multipliers, sums would only come
// and go.
template <class Weight, int M>
inline __attribute__((always_inline)) void multiply(const void* panel, int64_t pairs, const void* activations,
                                                    Ahead ahead, __m512 (&sum)[M][2]) {
  const char* line = static_cast<const char*>(panel);
  const float* x = static_cast<const float*>(activations);
  for (; pairs > 0; pairs -= kChunk / 2, x += M * kChunk) {
    const int64_t count = pairs < kChunk / 2 ? pairs : kChunk / 2;
    for (int64_t i = 0; i < count; ++i) {
      _mm_prefetch(ahead.at, _MM_HINT_T1);
      _mm_prefetch(ahead.at + 64, _MM_HINT_T1);
      ahead.at += ahead.step;
      const typename Weight::Raw raw_left = Weight::load(line), raw_right = Weight::load(line + Weight::kLine);
      __m512 left = Weight::even(line, raw_left), right = Weight::even(line + Weight::kLine, raw_right);
#pragma GCC unroll 16
      for (int r = 0; r < M; ++r) {
        const __m512 value = _mm512_set1_ps(x[r * kChunk + 2 * i]);
        add_product(sum[r][0], left, value);
        add_product(sum[r][1], right, value);
      }
      left = Weight::odd(line, raw_left);
      right = Weight::odd(line + Weight::kLine, raw_right);
#pragma GCC unroll 16
      for (int r = 0; r < M; ++r) {
        const __m512 value = _mm512_set1_ps(x[r * kChunk + 2 * i + 1]);
        add_product(sum[r][0], left, value);
        add_product(sum[r][1], right, value);
      }
      line += 2 * Weight::kLine;
    }
  }
}

template <class Weight, int M>
void gate_up(const void* panel, int64_t pairs, const void* x, void* activations, int64_t valid, Ahead ahead) {
  __m512 sum[M][2];
  zero<M>(sum);
  multiply<Weight, M>(panel, pairs, x, ahead, sum);
  auto* out = static_cast<float*>(activations);
  const __mmask16 mask = first_columns(valid);
#pragma GCC unroll 16
  for (int r = 0; r < M; ++r) {
    _mm512_storeu_ps(out + r * kChunk, _mm512_maskz_mov_ps(mask, swiglu(sum[r][0], sum[r][1])));
  }
}

template <class Weight, int M>
void down(const void* panel, int64_t pairs, const void* activations, const Target& target, Ahead ahead) {
  __m512 sum[M][2];
  zero<M>(sum);
  multiply<Weight, M>(panel, pairs, activations, ahead, sum);
#pragma GCC unroll 16
  for (int r = 0; r < M; ++r) add_down(target, r, sum[r][0], sum[r][1]);
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
Path make(Type type) {
  Path path{};
  path.name = "avx512";
  path.type = type;
  path.max_rows = kRows;
  path.activation_size = sizeof(float);
  path.chunk = kChunk;
  path.gather = &gather<Weight, Size>;
  path.peak = &peak;
  path.read = &read;
#define FFN_ROWS(m)                            \
  path.gate_up[(m) - 1] = &gate_up<Weight, m>; \
  path.down[(m) - 1] = &down<Weight, m>
  FFN_ROWS(1);
  FFN_ROWS(2);
  FFN_ROWS(3);
  FFN_ROWS(4);
  FFN_ROWS(5);
  FFN_ROWS(6);
  FFN_ROWS(7);
  FFN_ROWS(8);
  FFN_ROWS(9);
  FFN_ROWS(10);
  FFN_ROWS(11);
  FFN_ROWS(12);
#undef FFN_ROWS
  return path;
}

}  // namespace

const Path* avx512_path(Type type) {
  static const Path f32 = make<F32, 4>(Type::f32);
  static const Path f16 = make<F16, 2>(Type::f16);
  static const Path bf16 = make<Bf16, 2>(Type::bf16);
  return type == Type::f32 ? &f32 : type == Type::f16 ? &f16 : &bf16;
}

}  // namespace ffn::cpu
#else
namespace ffn::cpu {
const Path* avx512_path(Type) { return nullptr; }
}  // namespace ffn::cpu
#endif
