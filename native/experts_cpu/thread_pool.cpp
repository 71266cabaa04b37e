#include "experts_cpu/thread_pool.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

#include "shm/sync.hpp"

namespace ffn::cpu {
namespace {

constexpr int64_t kSpinNs = 20'000;  // covers items that follow at once; longer would take a core from Attention

long private_futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr,
                 0);
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  for (int worker = 1; worker < threads; ++worker) workers_.emplace_back([this, worker] { serve(worker); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  ticket_.fetch_add(1);
  private_futex(ticket_, FUTEX_WAKE, INT_MAX);
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(Work work, void* context) {
  if (workers_.empty()) {
    work(context, 0);
    return;
  }
  work_ = work;
  context_ = context;
  job_.store(kOpen, std::memory_order_release);
  ticket_.fetch_add(1);
  if (sleepers_.load() != 0) private_futex(ticket_, FUTEX_WAKE, INT_MAX);
  work(context, 0);
  job_.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int spins = 0; job_.load(std::memory_order_acquire) != 0; ++spins) {
    spins < 2000 ? pause_cpu() : static_cast<void>(sched_yield());
  }
}

bool ThreadPool::join_job(int worker) {
  uint32_t seen = job_.load(std::memory_order_acquire);
  while (seen & kOpen) {
    if (!job_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
    work_(context_, worker);
    job_.fetch_sub(1, std::memory_order_release);
    return true;
  }
  return false;
}

void ThreadPool::serve(int worker) {
  uint32_t seen = 0;
  int64_t idle_since = now_ns();
  while (!stop_.load()) {
    const uint32_t ticket = ticket_.load();
    if (ticket != seen) {
      seen = ticket;
      join_job(worker);
      idle_since = now_ns();
    } else if (now_ns() - idle_since < kSpinNs) {
      pause_cpu();
    } else {
      sleepers_.fetch_add(1);
      private_futex(ticket_, FUTEX_WAIT, seen);
      sleepers_.fetch_sub(1);
    }
  }
}

}  // namespace ffn::cpu
