// Where an expert's weights lie once packed. Pure arithmetic and copies.
//
// A matrix [N, K] is cut into panels of 32 columns (rows of N). A panel holds, for each pair (k, k + 1), two lines of
// 16 columns: for gate_up the first line is gate, the second up, of the same 16 intermediate columns, so that SwiGLU
// needs one panel only. Inside a line bf16 keeps k and k + 1 of a column side by side (one dword: what vdpbf16ps takes,
// and what a shift and a mask widen to f32); f16 and f32 keep 16 values of k, then 16 of k + 1. An expert is its
// gate_up panels, then its down panels, contiguous; K is padded to pairs, N to whole panels, with zeros.
#pragma once

#include <cstdint>

namespace ffn::cpu {

enum class Type : int32_t { f32 = 0, f16 = 1, bf16 = 2 };  // as ffn_dtype
enum class Matrix : int32_t { gate = 0, up = 1, down = 2 };

constexpr int64_t kColumns = 16;  // of a line
constexpr int64_t kChunk = 16;    // elements of k that a row of activations holds side by side, in most paths

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

struct Layout {
  Layout(int64_t hidden_size, int64_t inter_size, Type weight_type);

  const int64_t hidden, inter;
  const Type type;
  const int64_t hidden_pairs, inter_pairs;
  const int64_t gate_up_panels, down_panels;
  const int64_t gate_up_panel_bytes, down_panel_bytes;
  const int64_t expert_bytes;

  // `matrix` is contiguous [inter, hidden] (gate, up) or [hidden, inter] (down); `expert` is the packed memory.
  void pack(Matrix which, const void* matrix, char* expert) const;
  void unpack(Matrix which, void* matrix, const char* expert) const;
};

}  // namespace ffn::cpu
