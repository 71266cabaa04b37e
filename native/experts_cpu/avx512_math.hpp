// What the AVX512 paths and the one over tiles share. In an unnamed namespace: each file compiles its own copy, for its
// own CPU.
#pragma once

#include <immintrin.h>

#include "experts_cpu/path.hpp"

namespace ffn::cpu {
namespace {

template <int M>
inline __attribute__((always_inline)) void zero(__m512 (&sum)[M][2]) {
#pragma GCC unroll 16
  for (int r = 0; r < M; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
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

inline void add_down(const Target& target, int r, __m512 left, __m512 right) {
  const __mmask16 left_mask = first_columns(target.columns), right_mask = first_columns(target.columns - kColumns);
  float* out = target.out + target.rows[r] * target.stride;
  const __m512 scale = _mm512_set1_ps(target.scale[r]);
  __m512 a = _mm512_setzero_ps(), b = _mm512_setzero_ps();
  if (!target.first[r]) {
    a = _mm512_maskz_loadu_ps(left_mask, out);
    b = _mm512_maskz_loadu_ps(right_mask, out + kColumns);
  }
  _mm512_mask_storeu_ps(out, left_mask, _mm512_fmadd_ps(scale, left, a));
  _mm512_mask_storeu_ps(out + kColumns, right_mask, _mm512_fmadd_ps(scale, right, b));
}

}  // namespace
}  // namespace ffn::cpu
