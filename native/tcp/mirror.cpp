#include "tcp/mirror.hpp"

#include <utility>

namespace ffn {

Mirror::Mirror(std::shared_ptr<Arena> arena, int fd) : arena_(std::move(arena)), connection_(fd) {}

Mirror::~Mirror() = default;

void Mirror::start(std::function<void()> work) {
  threads_.emplace_back([this, work = std::move(work)] {
    try {
      work();
      end("");
    } catch (const std::exception& error) {
      end(error.what());
    }
  });
}

void Mirror::end(const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (over_.exchange(true, std::memory_order_acq_rel)) return;
  }
  arena_->fail(reason.empty() ? "the peer closed the data connection" : reason);
  connection_.shut_down();
  wake();
}

void Mirror::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
    over_.store(true, std::memory_order_release);
  }
  connection_.shut_down();
  wake();
  for (std::thread& thread : threads_) thread.join();
}

}  // namespace ffn
