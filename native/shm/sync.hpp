// Clock, pause and futex: what both sides wait with.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace ffn {

using Flag = std::atomic<uint64_t>;
using Word = std::atomic<uint32_t>;
static_assert(Flag::is_always_lock_free && Word::is_always_lock_free, "flags are shared between processes");

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Orders a flag's store before the load of the other side's sleeping word, and the other way round (Dekker).
inline void full_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// Shared futex (no PRIVATE flag): the word may be in another process's mapping as well.
inline void futex_wait(Word& word, uint32_t expected, int64_t timeout_ns) {
  timespec t{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &t, nullptr, 0);
}

inline void futex_wake(Word& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

// Wakes the sleeper on a word that says whether there is one; call full_fence() before.
inline void wake_if_sleeping(Word& word) {
  if (word.load(std::memory_order_relaxed) != 0) {
    word.store(0, std::memory_order_relaxed);
    futex_wake(word);
  }
}

}  // namespace ffn
