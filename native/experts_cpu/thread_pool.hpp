// A few threads that live as long as the kernel and sleep between items.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace ffn::cpu {

// The caller works too. A worker that wakes late finds the job closed and sleeps again: nobody waits for sleepers.
// Threads are not pinned: the caller is not ours to pin, and a pinned worker would share its core while another idles.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // in all, at least 1
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls work(context, worker) on the caller as worker 0 and on each other thread that comes while the caller's call
  // lasts; returns when all have returned. `work` must finish the whole job whoever takes part. One caller at a time.
  using Work = void (*)(void* context, int worker);
  void run(Work work, void* context);

 private:
  void serve(int worker);
  bool join_job(int worker);

  static constexpr uint32_t kOpen = 1u << 31;  // the rest counts workers inside the job

  alignas(64) std::atomic<uint32_t> ticket_{0};  // one more for each job: what workers sleep on
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint32_t> job_{0};
  Work work_ = nullptr;
  void* context_ = nullptr;
  std::vector<std::thread> workers_;
};

}  // namespace ffn::cpu
