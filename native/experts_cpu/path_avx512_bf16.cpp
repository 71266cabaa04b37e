// AVX512-BF16: products of bf16 pairs (vdpbf16ps), summed in f32. bf16 weights only.
//
// The instruction flushes denormals and adds a pair's two products in its own order, so its bits differ from those of
// the other paths; SwiGLU's result is rounded to bf16, the type that the down product takes.
#include "experts_cpu/path.hpp"

#if defined(__AVX512F__) && defined(__AVX512BF16__)
#include "experts_cpu/avx512_math.hpp"

namespace ffn::cpu {
namespace {

template <int M>
inline __attribute__((always_inline)) void multiply(const void* panel, int64_t pairs, const void* activations,
                                                    Ahead ahead, __m512 (&sum)[M][2]) {
  const char* line = static_cast<const char*>(panel);
  const char* x = static_cast<const char*>(activations);  // [k / 16][M][8 pairs]
  constexpr int64_t kRow = kChunk * 2;
  zero<M>(sum);
  for (; pairs > 0; pairs -= kChunk / 2, x += M * kRow) {
    const int64_t count = pairs < kChunk / 2 ? pairs : kChunk / 2;
    for (int64_t i = 0; i < count; ++i) {
      const __m512bh left = (__m512bh)_mm512_load_si512(line);
      const __m512bh right = (__m512bh)_mm512_load_si512(line + 64);
      _mm_prefetch(ahead.at, _MM_HINT_T1);
      _mm_prefetch(ahead.at + 64, _MM_HINT_T1);
      line += 128;
      ahead.at += ahead.step;
#pragma GCC unroll 16
      for (int r = 0; r < M; ++r) {
        int pair;
        __builtin_memcpy(&pair, x + r * kRow + i * 4, sizeof(pair));
        const __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], left, value);
        sum[r][1] = _mm512_dpbf16_ps(sum[r][1], right, value);
      }
    }
  }
}

template <int M>
void gate_up(const void* panel, int64_t pairs, const void* x, void* activations, int64_t valid, Ahead ahead) {
  __m512 sum[M][2];
  multiply<M>(panel, pairs, x, ahead, sum);
  auto* out = static_cast<uint16_t*>(activations);
  const __mmask16 mask = first_columns(valid);
#pragma GCC unroll 16
  for (int r = 0; r < M; ++r) {
    const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_mov_ps(mask, swiglu(sum[r][0], sum[r][1])));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + r * kChunk), (__m256i)rounded);
  }
}

template <int M>
void down(const void* panel, int64_t pairs, const void* activations, const Target& target, Ahead ahead) {
  __m512 sum[M][2];
  multiply<M>(panel, pairs, activations, ahead, sum);
#pragma GCC unroll 16
  for (int r = 0; r < M; ++r) add_down(target, r, sum[r][0], sum[r][1]);
}

void gather(const void* hidden, int64_t stride, const int64_t* rows, int count, void* x) {
  auto* out = static_cast<uint16_t*>(x);
  for (int r = 0; r < count; ++r) {
    const uint16_t* row = static_cast<const uint16_t*>(hidden) + rows[r] * stride;
    for (int64_t k = 0; k < stride; k += kChunk) {
      uint16_t* to = out + k * count + r * kChunk;
      const int64_t left = stride - k < kChunk ? stride - k : kChunk;
      for (int64_t c = 0; c < kChunk; ++c) to[c] = c < left ? row[k + c] : 0;
    }
  }
}

int64_t peak(int64_t rounds) {
  constexpr int kSums = 24;
  __m512 sum[kSums];
  for (auto& value : sum) value = _mm512_setzero_ps();
  __m512i a = _mm512_set1_epi32(0x3a803a80), b = a;
  for (int64_t i = 0; i < rounds; ++i) {
    asm volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 24
    for (int j = 0; j < kSums; ++j) sum[j] = _mm512_dpbf16_ps(sum[j], (__m512bh)a, (__m512bh)b);
  }
  for (auto& value : sum) asm volatile("" : : "v"(value));
  return rounds * kSums * 32 * 2;
}

Path make() {
  Path path{};
  path.name = "avx512_bf16";
  path.type = Type::bf16;
  path.max_rows = 14;
  path.activation_size = 2;
  path.chunk = kChunk;
  path.gather = &gather;
  path.peak = &peak;
  path.read = avx512_path(Type::bf16)->read;
#define FFN_ROWS(m)                    \
  path.gate_up[(m) - 1] = &gate_up<m>; \
  path.down[(m) - 1] = &down<m>
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
  FFN_ROWS(13);
  FFN_ROWS(14);
#undef FFN_ROWS
  return path;
}

}  // namespace

const Path* avx512_bf16_path(Type type) {
  static const Path bf16 = make();
  return type == Type::bf16 ? &bf16 : nullptr;
}

}  // namespace ffn::cpu
#else
namespace ffn::cpu {
const Path* avx512_bf16_path(Type) { return nullptr; }
}  // namespace ffn::cpu
#endif
