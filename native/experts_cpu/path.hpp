// One instruction set's way of computing: plain functions, chosen once at run time.
//
// Every path adds up the products of a (row, column) in an order of its own that no number of rows changes: so a row's
// result has the same bits in every block it may fall into. Files that implement a path are compiled with flags
// of their own and must not instantiate anything shared.
#pragma once

#include <cstdint>

#include "experts_cpu/layout.hpp"

namespace ffn::cpu {

constexpr int kMaxRows = 32;

// Where `down` adds its result: out[rows[r] * stride + c] (+)= scale[r] * y[r][c] for c < columns.
struct Target {
  float* out;
  int64_t stride;
  int64_t columns;  // 1 ... 32
  const int64_t* rows;
  const float* scale;
  const uint8_t* first;  // 1: nothing was added to this row before, so store
};

// What is fetched meanwhile: `step` bytes from `at` on for every pair of k. A panel is passed over once for each block
// of rows, and each pass fetches its share of the next: all of it within one pass, memory would be waited for in that
// pass and lie idle in the others.
struct Ahead {
  const char* at;
  int64_t step;

  // Always inlined: files with other flags must not share it.
  inline __attribute__((always_inline)) Ahead part(int64_t index, int64_t parts, int64_t pairs) const {
    return {at + index * pairs * step / parts, step / parts};
  }
};

struct Path {
  const char* name;
  Type type;  // of the weights
  int max_rows;
  int64_t activation_size;  // bytes of an element of x and of SwiGLU's result, both [k / chunk][rows][chunk]
  int64_t chunk;            // elements of k that a row holds side by side: 16, or a multiple

  // Rows [from 0, hidden) of the weights' type, gathered by index, into the blocked form; padded with zeros to `chunk`.
  void (*gather)(const void* hidden, int64_t stride, const int64_t* rows, int count, void* x);
  // SwiGLU of one gate_up panel for `r + 1` rows: 16 columns, written to activations + row * chunk. Columns from
  // `valid` on are zeros.
  void (*gate_up[kMaxRows])(const void* panel, int64_t pairs, const void* x, void* activations, int64_t valid,
                            Ahead ahead);
  void (*down[kMaxRows])(const void* panel, int64_t pairs, const void* activations, const Target& target, Ahead ahead);
  // For many rows, null where a path gains nothing by it: products of `pairs` pairs of a panel with `r + 1` rows, added
  // to sums [r + 1][32] (`start`: the sums are not read); and what gate_up and down do with their sums.
  void (*accumulate[kMaxRows])(const void* panel, int64_t pairs, const void* x, float* sums, bool start, Ahead ahead);
  void (*finish_gate_up)(const float* sums, int count, void* activations, int64_t valid);
  void (*finish_down)(const float* sums, int count, const Target& target);

  // What a thread does after its last call for an item; may be null.
  void (*leave)();

  // Ceilings: multiply-adds in registers (returns flops done), and reading memory (returns a value to keep).
  int64_t (*peak)(int64_t rounds);
  uint64_t (*read)(const void* memory, int64_t nbytes);
};

// Null where this build or `type` has no such path; whether the CPU can run it is not asked here.
const Path* scalar_path(Type type);
const Path* avx2_path(Type type);
const Path* avx512_path(Type type);
const Path* avx512_bf16_path(Type type);
const Path* amx_path(Type type);

}  // namespace ffn::cpu
