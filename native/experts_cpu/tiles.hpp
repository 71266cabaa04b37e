// The eight tile registers as path_amx.cpp uses them: two halves of a block's rows, two lines of a panel.
//
// tiles_amx.hpp has the instructions, tests/experts/tiles_emulated.hpp the same in plain C++, for tests on any CPU.
#pragma once

#include <cstdint>

#include "experts_cpu/path.hpp"

namespace ffn::cpu {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // of a row: 16 sums, or 16 pairs of k
constexpr int kTilePairs = 16;

// Sums [rows][16] of a half's rows and a line's columns; a half's rows [rows][16 pairs]; a line [16 pairs][16 columns].
enum Tile { kFirstLeft, kFirstRight, kSecondLeft, kSecondRight, kFirstRows, kSecondRows, kLeft, kRight };

namespace {

constexpr uint8_t tile_rows_of(int tile, int first, int second) {
  if (tile == kLeft || tile == kRight) return kTilePairs;
  return static_cast<uint8_t>(tile == kFirstLeft || tile == kFirstRight || tile == kFirstRows ? first : second);
}

}  // namespace

}  // namespace ffn::cpu
