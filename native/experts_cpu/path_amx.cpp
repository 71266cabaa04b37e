// AMX: tiles of 16 rows, 16 columns and 16 bf16 pairs (tdpbf16ps), summed in f32. bf16 weights only.
//
// A tile instruction has an order of its own in which it adds a row's products, and flushes denormals; it has it for
// any number of rows, so every block goes through it, whatever its size, and k is cut at the same places. SwiGLU's
// result is rounded to bf16, the type that the down product takes.
#include "experts_cpu/path.hpp"

#if defined(FFN_FAAS_EMULATED_TILES)
#include "tiles_emulated.hpp"
#elif defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include "experts_cpu/tiles_amx.hpp"
#endif

#if defined(FFN_FAAS_EMULATED_TILES) || (defined(__AMX_BF16__) && defined(__AVX512BF16__))
#include <cstring>

namespace ffn::cpu {
namespace {

constexpr int kRows = 2 * kTileRows;
constexpr int64_t kTileChunk = 2 * kTilePairs;    // elements of k
constexpr int64_t kPair = 2 * kTileBytes;         // bytes of a pair's two lines in a panel
constexpr int64_t kSumsBytes = 2 * kColumns * 4;  // of a row's sums, left and right columns
constexpr int64_t kQuarter = kTilePairs / 4;

// A block's rows are split evenly: a tile instruction takes 16 cycles for 16 rows, 10 for 8 or fewer.
constexpr int first_half(int rows) { return rows <= kTileRows ? rows : (rows + 1) / 2; }

inline void fetch(Ahead& ahead, int64_t pairs) {
  const char* const end = ahead.at + pairs * ahead.step;
  for (const char* at = ahead.at; at < end; at += 64) __builtin_prefetch(at, 0, 2);
  ahead.at = end;
}

// One tile's worth of k. The next panel is fetched between products: all at once, the fetches would be waited for.
template <bool kTwo>
inline void step(const char* lines, const char* x, int first, Ahead& ahead) {
  load_tile<kLeft>(lines, kPair);
  load_tile<kFirstRows>(x, kTileBytes);
  multiply_tiles<kFirstLeft, kFirstRows, kLeft>();
  fetch(ahead, kQuarter);
  load_tile<kRight>(lines + kTileBytes, kPair);
  multiply_tiles<kFirstRight, kFirstRows, kRight>();
  fetch(ahead, kQuarter);
  if constexpr (kTwo) {
    load_tile<kSecondRows>(x + first * kTileBytes, kTileBytes);
    multiply_tiles<kSecondLeft, kSecondRows, kLeft>();
  }
  fetch(ahead, kQuarter);
  if constexpr (kTwo) multiply_tiles<kSecondRight, kSecondRows, kRight>();
  fetch(ahead, kQuarter);
}

// The last pairs, fewer than a tile has: filled up with zeros, since neither rows nor panels need be readable behind.
template <bool kTwo>
inline void last_step(const char* lines, const char* x, int first, int rows, int64_t pairs) {
  alignas(64) char some_lines[kTilePairs * kPair] = {}, some_rows[kRows * kTileBytes] = {};
  std::memcpy(some_lines, lines, pairs * kPair);
  for (int r = 0; r < rows; ++r) std::memcpy(some_rows + r * kTileBytes, x + r * kTileBytes, pairs * 4);
  Ahead nothing{lines, 0};
  step<kTwo>(some_lines, some_rows, first, nothing);
}

// Sums [rows][32] of a panel, left and right columns. k is not cut for many rows: it gained nothing.
template <bool kTwo>
__attribute__((noinline)) void multiply(const char* lines, int64_t pairs, const char* x, int rows, Ahead ahead,
                                        float* sums) {
  const int first = first_half(rows);
  configure_tiles(first, rows - first);
  zero_tile<kFirstLeft>();
  zero_tile<kFirstRight>();
  if constexpr (kTwo) {
    zero_tile<kSecondLeft>();
    zero_tile<kSecondRight>();
  }
  for (; pairs >= kTilePairs; pairs -= kTilePairs, lines += kTilePairs * kPair, x += rows * kTileBytes) {
    step<kTwo>(lines, x, first, ahead);
  }
  if (pairs > 0) last_step<kTwo>(lines, x, first, rows, pairs);
  store_tile<kFirstLeft>(sums, kSumsBytes);
  store_tile<kFirstRight>(sums + kColumns, kSumsBytes);
  if constexpr (kTwo) {
    float* const second = sums + first * 2 * kColumns;
    store_tile<kSecondLeft>(second, kSumsBytes);
    store_tile<kSecondRight>(second + kColumns, kSumsBytes);
  }
}

template <int M>
inline void multiply_rows(const void* panel, int64_t pairs, const void* x, Ahead ahead, float* sums) {
  multiply<(M > kTileRows)>(static_cast<const char*>(panel), pairs, static_cast<const char*>(x), M, ahead, sums);
}

__attribute__((noinline)) void finish_gate_up(const float* sums, int count, void* activations, int64_t valid) {
  auto* out = static_cast<uint16_t*>(activations);
  for (int r = 0; r < count; ++r, sums += 2 * kColumns) {
    store_swiglu(sums, sums + kColumns, valid, out + r * kTileChunk);
  }
}

__attribute__((noinline)) void finish_down(const float* sums, int count, const Target& target) {
  for (int r = 0; r < count; ++r, sums += 2 * kColumns) add_row(target, r, sums, sums + kColumns);
}

template <int M>
void gate_up(const void* panel, int64_t pairs, const void* x, void* activations, int64_t valid, Ahead ahead) {
  alignas(64) float sums[M * 2 * kColumns];
  multiply_rows<M>(panel, pairs, x, ahead, sums);
  finish_gate_up(sums, M, activations, valid);
}

template <int M>
void down(const void* panel, int64_t pairs, const void* activations, const Target& target, Ahead ahead) {
  alignas(64) float sums[M * 2 * kColumns];
  multiply_rows<M>(panel, pairs, activations, ahead, sums);
  finish_down(sums, M, target);
}

void gather(const void* hidden, int64_t stride, const int64_t* rows, int count, void* x) {
  auto* out = static_cast<char*>(x);
  for (int r = 0; r < count; ++r) {
    const auto* row = static_cast<const char*>(hidden) + rows[r] * stride * 2;
    char* to = out + r * kTileBytes;
    int64_t left = stride * 2;
    for (; left >= kTileBytes; left -= kTileBytes, row += kTileBytes, to += count * kTileBytes) {
      std::memcpy(to, row, kTileBytes);
    }
    if (left == 0) continue;
    std::memset(to, 0, kTileBytes);
    std::memcpy(to, row, left);
  }
}

int64_t peak(int64_t rounds) {
  alignas(64) char ones[kTileRows * kTileBytes];
  for (size_t i = 0; i < sizeof(ones); i += 2) std::memcpy(ones + i, "\x80\x3a", 2);  // 2^-10
  configure_tiles(kTileRows, kTileRows);
  load_tile<kFirstRows>(ones, kTileBytes);
  load_tile<kLeft>(ones, kTileBytes);
  zero_tile<kFirstLeft>();
  zero_tile<kFirstRight>();
  zero_tile<kSecondLeft>();
  zero_tile<kSecondRight>();
  for (int64_t i = 0; i < rounds / 4; ++i) {
    multiply_tiles<kFirstLeft, kFirstRows, kLeft>();
    multiply_tiles<kFirstRight, kFirstRows, kLeft>();
    multiply_tiles<kSecondLeft, kFirstRows, kLeft>();
    multiply_tiles<kSecondRight, kFirstRows, kLeft>();
  }
  release_tiles();
  return rounds / 4 * 4 * kTileRows * kColumns * kTileChunk * 2;
}

template <int M>
void set_rows(Path& path) {
  path.gate_up[M - 1] = &gate_up<M>;
  path.down[M - 1] = &down<M>;
  if constexpr (M > 1) set_rows<M - 1>(path);
}

Path make() {
  Path path{};
  path.name = "amx";
  path.type = Type::bf16;
  path.max_rows = kRows;
  path.activation_size = 2;
  path.chunk = kTileChunk;
  path.gather = &gather;
  path.leave = &release_tiles;
  path.peak = &peak;
  path.read = memory_reader();
  set_rows<kRows>(path);
  return path;
}

}  // namespace

const Path* amx_path(Type type) {
  if (type != Type::bf16) return nullptr;
  static const Path bf16 = make();
  return &bf16;
}

}  // namespace ffn::cpu
#else
namespace ffn::cpu {
const Path* amx_path(Type) { return nullptr; }
}  // namespace ffn::cpu
#endif
