// What share of a thread's multiply-add peak the AVX2 path reaches when everything is in cache, by rows of an expert.
//
//   g++ -O3 -DNDEBUG -std=c++17 -mavx2 -mfma -mf16c -I native -I native/include -o cpu_panels
//     tests/bench/cpu_panels.cpp native/experts_cpu/path_avx2.cpp && ./cpu_panels      (one line)
//
// One gate_up panel of hidden 2048, bf16, and stretches of 128 pairs with sums kept in memory (what experts with more
// rows are computed by); the best of many short runs, which is what interruptions disturb least. One line a round.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "experts_cpu/path.hpp"

namespace {

using namespace ffn::cpu;

constexpr int64_t kPairs = 1024, kStretch = 128, kBytes = 1 << 20;

double best(int runs, double flops, const std::function<void()>& work) {
  double found = 0;
  for (int run = 0; run < runs; ++run) {
    const auto start = std::chrono::steady_clock::now();
    work();
    found = std::max(found, flops / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return found;
}

template <class Element>
Element* memory() {
  return static_cast<Element*>(std::aligned_alloc(64, kBytes));
}

}  // namespace

int main() {
  const Path& path = *avx2_path(Type::bf16);
  auto* panel = memory<uint16_t>();
  float *x = memory<float>(), *activations = memory<float>(), *sums = memory<float>();
  for (int64_t i = 0; i < kBytes / 2; ++i) panel[i] = static_cast<uint16_t>(0x3f80 + i % 7);
  for (int64_t i = 0; i < kBytes / 4; ++i) x[i] = 0.01f * static_cast<float>(i % 13), sums[i] = 0;
  for (int round = 0; round < 3; ++round) {
    constexpr int64_t kRounds = 500'000;
    const double peak = best(5, static_cast<double>(path.peak(1)) * kRounds, [&] { path.peak(kRounds); });
    std::printf("peak %.1f GFLOP/s; rows: whole panel, stretches:", peak / 1e9);
    for (int rows = 1; rows <= path.max_rows; ++rows) {
      const double pair = 2.0 * 2 * kColumns * 2 * rows;
      const double whole = best(40, 20 * kPairs * pair, [&] {
        for (int i = 0; i < 20; ++i) path.gate_up[rows - 1](panel, kPairs, x, activations, kColumns, {panel, 128});
      });
      const double cut = best(40, 160 * kStretch * pair, [&] {
        for (int i = 0; i < 160; ++i) path.accumulate[rows - 1](panel, kStretch, x, sums, false, {panel, 128});
      });
      std::printf("  %d: %.2f %.2f", rows, whole / peak, cut / peak);
    }
    std::printf("\n");
  }
}
