#include "experts_cpu/layout.hpp"

#include <algorithm>
#include <cstring>

namespace ffn::cpu {
namespace {

constexpr int64_t kTile = 32;  // elements of k that go through L1 at a time, for 16 rows of the matrix

// Calls visit(row, k, valid rows, valid elements, first line) for each tile of a matrix, in the order of its memory.
template <class Visit>
void for_tiles(const Layout& layout, Matrix which, const Visit& visit) {
  const bool down = which == Matrix::down;
  const int64_t rows = down ? layout.hidden : layout.inter;
  const int64_t width = down ? layout.inter : layout.hidden;
  const int64_t panel_bytes = down ? layout.down_panel_bytes : layout.gate_up_panel_bytes;
  const int64_t start = down ? layout.gate_up_panels * layout.gate_up_panel_bytes : 0;
  const int64_t line_bytes = 2 * kColumns * size_of(layout.type);
  const int64_t groups = down ? 2 * layout.down_panels : layout.gate_up_panels;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t half = down ? group % 2 : static_cast<int64_t>(which);
    const int64_t panel = start + (down ? group / 2 : group) * panel_bytes;
    const int64_t row = group * kColumns;
    for (int64_t k = 0; k < width; k += kTile) {
      visit(row, k, std::clamp<int64_t>(rows - row, 0, kColumns), std::min(kTile, width - k),
            panel + (k / 2 * 2 + half) * line_bytes);
    }
  }
}

// Where element (k, column) of a tile lies in its lines; every other line belongs to the panel's other half.
template <class Element, bool kPaired>
constexpr int64_t place(int64_t k, int64_t column) {
  return k / 2 * 4 * kColumns + (kPaired ? column * 2 + k % 2 : k % 2 * kColumns + column);
}

template <class Element, bool kPaired>
void pack_as(const Layout& layout, Matrix which, const void* matrix, char* expert) {
  const int64_t width = which == Matrix::down ? layout.inter : layout.hidden;
  for_tiles(layout, which, [&](int64_t row, int64_t k, int64_t rows, int64_t elements, int64_t line) {
    Element tile[kColumns][kTile] = {};
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(tile[r], static_cast<const Element*>(matrix) + (row + r) * width + k, elements * sizeof(Element));
    }
    auto* out = reinterpret_cast<Element*>(expert + line);
    for (int64_t i = 0; i < elements; i += 2) {
      for (int64_t r = 0; r < kColumns; ++r) {
        out[place<Element, kPaired>(i, r)] = tile[r][i];
        out[place<Element, kPaired>(i + 1, r)] = tile[r][i + 1];
      }
    }
  });
}

template <class Element, bool kPaired>
void unpack_as(const Layout& layout, Matrix which, void* matrix, const char* expert) {
  const int64_t width = which == Matrix::down ? layout.inter : layout.hidden;
  for_tiles(layout, which, [&](int64_t row, int64_t k, int64_t rows, int64_t elements, int64_t line) {
    const auto* from = reinterpret_cast<const Element*>(expert + line);
    for (int64_t r = 0; r < rows; ++r) {
      auto* out = static_cast<Element*>(matrix) + (row + r) * width + k;
      for (int64_t i = 0; i < elements; ++i) out[i] = from[place<Element, kPaired>(i, r)];
    }
  });
}

}  // namespace

Layout::Layout(int64_t hidden_size, int64_t inter_size, Type weight_type)
    : hidden(hidden_size),
      inter(inter_size),
      type(weight_type),
      hidden_pairs(ceil_div(hidden, 2)),
      inter_pairs(ceil_div(inter, 2)),
      gate_up_panels(ceil_div(inter, kColumns)),
      down_panels(ceil_div(hidden, 2 * kColumns)),
      gate_up_panel_bytes(hidden_pairs * 4 * kColumns * size_of(type)),
      down_panel_bytes(inter_pairs * 4 * kColumns * size_of(type)),
      expert_bytes(gate_up_panels * gate_up_panel_bytes + down_panels * down_panel_bytes) {}

void Layout::pack(Matrix which, const void* matrix, char* expert) const {
  if (type == Type::bf16) return pack_as<uint16_t, true>(*this, which, matrix, expert);
  if (type == Type::f16) return pack_as<uint16_t, false>(*this, which, matrix, expert);
  pack_as<uint32_t, false>(*this, which, matrix, expert);
}

void Layout::unpack(Matrix which, void* matrix, const char* expert) const {
  if (type == Type::bf16) return unpack_as<uint16_t, true>(*this, which, matrix, expert);
  if (type == Type::f16) return unpack_as<uint16_t, false>(*this, which, matrix, expert);
  unpack_as<uint32_t, false>(*this, which, matrix, expert);
}

}  // namespace ffn::cpu
