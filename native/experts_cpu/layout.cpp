#include "experts_cpu/layout.hpp"

#include <algorithm>
#include <cstring>

namespace ffn::cpu {
namespace {

constexpr int64_t kBlock = 32;  // elements of k packed for 16 columns before the next: both sides stay in L1

// Position, in elements, of (k, column) of one half in a panel.
inline int64_t position(Type type, int64_t half, int64_t k, int64_t column) {
  const int64_t line = ((k >> 1) * 2 + half) * 2 * kColumns;
  return type == Type::bf16 ? line + column * 2 + (k & 1) : line + (k & 1) * kColumns + column;
}

template <class Element, class Copy>
void walk(const Layout& layout, Matrix which, const Copy& copy) {
  const bool down = which == Matrix::down;
  const int64_t rows = down ? layout.hidden : layout.inter;
  const int64_t width = down ? layout.inter : layout.hidden;
  const int64_t panel_bytes = down ? layout.down_panel_bytes : layout.gate_up_panel_bytes;
  const int64_t start = down ? layout.gate_up_panels * layout.gate_up_panel_bytes : 0;
  const int64_t groups = ceil_div(rows, kColumns) + (down ? ceil_div(rows, kColumns) % 2 : 0);
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t half = down ? group % 2 : static_cast<int64_t>(which);
    const int64_t panel = start + (down ? group / 2 : group) * panel_bytes;
    const int64_t padded = ceil_div(width, 2) * 2;
    for (int64_t k0 = 0; k0 < padded; k0 += kBlock) {
      for (int64_t column = 0; column < kColumns; ++column) {
        const int64_t row = group * kColumns + column;
        const int64_t end = std::min(padded, k0 + kBlock);
        for (int64_t k = k0; k < end; ++k) {
          copy(row < rows && k < width ? row * width + k : -1, panel, position(layout.type, half, k, column));
        }
      }
    }
  }
}

template <class Element>
void pack_as(const Layout& layout, Matrix which, const void* matrix, char* expert) {
  const auto* source = static_cast<const Element*>(matrix);
  walk<Element>(layout, which, [&](int64_t from, int64_t panel, int64_t to) {
    reinterpret_cast<Element*>(expert + panel)[to] = from < 0 ? Element{} : source[from];
  });
}

template <class Element>
void unpack_as(const Layout& layout, Matrix which, void* matrix, const char* expert) {
  auto* target = static_cast<Element*>(matrix);
  walk<Element>(layout, which, [&](int64_t to, int64_t panel, int64_t from) {
    if (to >= 0) target[to] = reinterpret_cast<const Element*>(expert + panel)[from];
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
  size_of(type) == 2 ? pack_as<uint16_t>(*this, which, matrix, expert)
                     : pack_as<uint32_t>(*this, which, matrix, expert);
}

void Layout::unpack(Matrix which, void* matrix, const char* expert) const {
  size_of(type) == 2 ? unpack_as<uint16_t>(*this, which, matrix, expert)
                     : unpack_as<uint32_t>(*this, which, matrix, expert);
}

}  // namespace ffn::cpu
