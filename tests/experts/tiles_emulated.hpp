// The tile instructions in plain C++, bit for bit: so that path_amx.cpp can be tested where there is no AMX.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "experts_cpu/tiles.hpp"

namespace ffn::cpu {
namespace {

struct EmulatedTiles {
  uint8_t rows[8] = {};
  alignas(64) uint32_t value[8][kTileRows][16] = {};
};

thread_local EmulatedTiles tiles;

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Denormals are zeros of their sign, both read and written.
inline float flushed(float value) {
  const uint32_t bits = as_bits(value);
  return (bits & 0x7f800000) == 0 ? as_float(bits & 0x80000000) : value;
}

inline void configure_tiles(int first, int second) {
  bool same = true;
  for (int tile = 0; tile < 8; ++tile) same = same && tiles.rows[tile] == tile_rows_of(tile, first, second);
  if (same) return;
  tiles = {};
  for (int tile = 0; tile < 8; ++tile) tiles.rows[tile] = tile_rows_of(tile, first, second);
}

void release_tiles() { tiles = {}; }

template <int Tile>
inline void zero_tile() {
  std::memset(tiles.value[Tile], 0, sizeof(tiles.value[Tile]));
}

template <int Tile>
inline void load_tile(const void* from, int64_t stride) {
  zero_tile<Tile>();
  for (int row = 0; row < tiles.rows[Tile]; ++row) {
    std::memcpy(tiles.value[Tile][row], static_cast<const char*>(from) + row * stride, kTileBytes);
  }
}

template <int Tile>
inline void store_tile(void* to, int64_t stride) {
  for (int row = 0; row < tiles.rows[Tile]; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, tiles.value[Tile][row], kTileBytes);
  }
}

// Products of even and of odd k are summed apart over the 16 pairs, then together, then added to the sum.
template <int Sum, int Rows, int Weights>
inline void multiply_tiles() {
  for (int row = 0; row < tiles.rows[Sum]; ++row) {
    float even[16] = {}, odd[16] = {};
    for (int pair = 0; pair < kTilePairs; ++pair) {
      const uint32_t x = tiles.value[Rows][row][pair];
      const float x_even = flushed(as_float(x << 16)), x_odd = flushed(as_float(x & 0xffff0000));
      for (int column = 0; column < 16; ++column) {
        const uint32_t weight = tiles.value[Weights][pair][column];
        even[column] = flushed(std::fma(x_even, flushed(as_float(weight << 16)), even[column]));
        odd[column] = flushed(std::fma(x_odd, flushed(as_float(weight & 0xffff0000)), odd[column]));
      }
    }
    for (int column = 0; column < 16; ++column) {
      const float sum = flushed(as_float(tiles.value[Sum][row][column]));
      tiles.value[Sum][row][column] = as_bits(flushed(sum + flushed(even[column] + odd[column])));
    }
  }
}

inline void store_swiglu(const float* gate, const float* up, int64_t valid, uint16_t* out) {
  for (int column = 0; column < 16; ++column) {
    const float value = column < valid ? gate[column] / (1.0f + std::exp(-gate[column])) * up[column] : 0.0f;
    const uint32_t bits = as_bits(flushed(value));
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    out[column] = static_cast<uint16_t>(nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

inline void add_row(const Target& target, int row, const float* left, const float* right) {
  float* out = target.out + target.rows[row] * target.stride;
  for (int64_t column = 0; column < target.columns; ++column) {
    const float sum = column < kColumns ? left[column] : right[column - kColumns];
    out[column] = std::fma(target.scale[row], sum, target.first[row] ? 0.0f : out[column]);
  }
}

inline auto memory_reader() { return scalar_path(Type::bf16)->read; }

}  // namespace
}  // namespace ffn::cpu
