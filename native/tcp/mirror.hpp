// Windows whose other side is on another host: each side has an arena of its own, and threads that carry what is
// released in one to the other. Receiver, items and client work on them as on shared memory and know nothing of it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "shm/arena.hpp"
#include "tcp/connection.hpp"

namespace ffn {

// Common to both sides: an arena, the connection, the threads, and how they end.
class Mirror {
 public:
  Mirror(std::shared_ptr<Arena> arena, int fd);  // takes fd over
  virtual ~Mirror();
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  const std::shared_ptr<Arena>& arena() const { return arena_; }
  // Any thread. Ends the connection and joins the threads; nothing is carried afterwards. Idempotent.
  void close();

 protected:
  // Runs work in a thread; its end ends the connection, and what it throws becomes the arena's failure.
  void start(std::function<void()> work);
  virtual void wake() = 0;  // lets threads that wait for memory look at is_over()
  bool is_over() const { return over_.load(std::memory_order_acquire); }

  const std::shared_ptr<Arena> arena_;
  const Connection connection_;

 private:
  void end(const std::string& reason);

  std::atomic<bool> over_{false};
  std::mutex mutex_;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

// F: receives posts into the dispatch windows, sends what is released in the combine windows.
class ServiceMirror : public Mirror {
 public:
  // doorbell: the receiver's, duplicated here. on_fault: the peer broke the protocol, in a thread of this object.
  ServiceMirror(std::shared_ptr<Arena> arena, int fd, int doorbell, std::function<void(const std::string&)> on_fault);
  ~ServiceMirror() override;

 private:
  void wake() override;
  void receive_posts();
  void receive_post(int64_t stage, int32_t layer, int32_t rows);
  void send_answers(int64_t stage);
  void ring() const;

  const int doorbell_;
  const std::function<void(const std::string&)> on_fault_;
  std::vector<std::atomic<uint64_t>> expected_;  // by stage: flag of the post under way, 0 = none
  std::vector<std::atomic<int32_t>> rows_;       // by stage: of that post
  std::mutex sending_;                           // one answer at a time
};

// A: sends what is released in the dispatch windows, receives answers into the combine windows. One thread per way.
class AttentionMirror : public Mirror {
 public:
  AttentionMirror(const Geometry& geometry, uint64_t epoch, int fd);
  ~AttentionMirror() override;

 private:
  void wake() override;
  void send_posts();
  void send_post(int64_t stage, uint64_t flag);
  void receive_answers();

  std::vector<std::atomic<uint64_t>> awaited_;  // by stage: flag of the post without an answer, 0 = none
  std::vector<std::atomic<int32_t>> rows_;      // by stage: of that post
};

}  // namespace ffn
