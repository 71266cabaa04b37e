#include "experts_cpu/dispatch.hpp"

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "experts_cpu/tile_access.hpp"

namespace ffn::cpu {
namespace {

// The path over AMX's tiles, of which the kernel is not asked here; null where the CPU cannot run it.
const Path* tile_path(Type type) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
  if (avx512 && cpu_has_tiles()) return amx_path(type);
#endif
  static_cast<void>(type);
  return nullptr;
}

// A path's function is called only once the CPU is known to run it: its file was compiled for that CPU as a whole.
std::vector<const Path*> runnable(Type type) {
  std::vector<const Path*> paths;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
  const Path* const tiles = tile_path(type);
  if (tiles != nullptr && tile_permission() == 0) paths.push_back(tiles);
  // Intel's cores start vdpbf16ps every other cycle and two f32 multiply-adds in each: half the flops (Emerald Rapids:
  // 82 and 164 GFLOP/s a thread). Its rounding of SwiGLU's result would be for nothing there.
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (bf16 && !__builtin_cpu_is("intel")) paths.push_back(avx512_bf16_path(type));
  if (avx512) paths.push_back(avx512_path(type));
  if (bf16 && __builtin_cpu_is("intel")) paths.push_back(avx512_bf16_path(type));
  if (avx2) paths.push_back(avx2_path(type));
#endif
  paths.push_back(scalar_path(type));
  std::vector<const Path*> present;
  for (const Path* path : paths) {
    if (path != nullptr) present.push_back(path);
  }
  return present;
}

}  // namespace

std::vector<std::string> available_paths(Type type) {
  std::vector<std::string> names;
  for (const Path* path : runnable(type)) names.emplace_back(path->name);
  return names;
}

std::string refused_path(Type type) {
  const Path* const tiles = tile_path(type);
  if (tiles == nullptr || tile_permission() == 0) return "";
  // What Linux says where a thread's signal stack has no room for the tiles.
  const bool stack = tile_permission() == ENOSPC;
  return std::string(tiles->name) + ": " + (stack ? "a signal stack is too small" : std::strerror(tile_permission()));
}

const Path& choose_path(Type type, const std::string& name) {
  std::string known;
  for (const Path* path : runnable(type)) {
    if (name == "auto" || name == path->name) return *path;
    known += std::string(known.empty() ? "" : ", ") + path->name;
  }
  throw std::invalid_argument("this CPU has no path '" + name + "' for these weights; it has " + known);
}

}  // namespace ffn::cpu
