// The tile instructions, and rows of their sums in AVX512. In an unnamed namespace: for one file, and its CPU.
#pragma once

#include <cstdint>

#include "experts_cpu/avx512_math.hpp"
#include "experts_cpu/tiles.hpp"

namespace ffn::cpu {
namespace {

// What ldtilecfg reads.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

thread_local int tile_rows = 0;  // of this thread's configuration: first * 32 + second

// Sums, rows and weights of `first` and `second` rows (1 ... 16, 0 ... 16). Costs hundreds of cycles, so what stands is
// left alone.
inline void configure_tiles(int first, int second) {
  if (tile_rows == first * 32 + second) return;
  tile_rows = first * 32 + second;
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.rows[tile] = tile_rows_of(tile, first, second);
    shapes.row_bytes[tile] = shapes.rows[tile] != 0 ? kTileBytes : 0;
  }
  asm volatile("ldtilecfg %0" : : "m"(shapes));
}

// As long as a thread holds tiles, 8 KiB more are saved and restored when it gives way.
void release_tiles() {
  if (tile_rows == 0) return;
  tile_rows = 0;
  asm volatile("tilerelease");
}

template <int Tile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}

template <int Tile>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(Tile) : "memory");
}

template <int Tile>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(Tile) : "memory");
}

template <int Sum, int Rows, int Weights>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(Rows), "i"(Weights));
}

inline void store_swiglu(const float* gate, const float* up, int64_t valid, uint16_t* out) {
  const __m512 result = swiglu(_mm512_load_ps(gate), _mm512_load_ps(up));
  const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_mov_ps(first_columns(valid), result));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)rounded);
}

inline void add_row(const Target& target, int row, const float* left, const float* right) {
  add_down(target, row, _mm512_load_ps(left), _mm512_load_ps(right));
}

inline auto memory_reader() { return avx512_path(Type::bf16)->read; }

}  // namespace
}  // namespace ffn::cpu
