#include "experts_cpu/tile_access.hpp"

#include <cerrno>
#include <cstdint>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ffn::cpu {
namespace {

constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, in <asm/prctl.h> since Linux 5.16
constexpr unsigned kTileData = 18;           // its number among the states that XSAVE keeps; 17 is the configuration

uint64_t kept_states() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

int ask() { return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno; }

}  // namespace

bool cpu_has_tiles() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tiles = d >> 24 & 1, products = d >> 22 & 1;
  return tiles && products && (kept_states() >> (kTileData - 1) & 3) == 3;
}

int tile_permission() {
  static const int answer = ask();
  return answer;
}

}  // namespace ffn::cpu
#else
namespace ffn::cpu {
bool cpu_has_tiles() { return false; }
int tile_permission() { return ENOSYS; }
}  // namespace ffn::cpu
#endif
