#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>

#include "tcp/frames.hpp"
#include "tcp/mirror.hpp"

namespace ffn {
namespace {

int make_doorbell() {
  const int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  return fd;
}

std::string text(int64_t value) { return std::to_string(value); }

}  // namespace

AttentionMirror::AttentionMirror(const Geometry& geometry, uint64_t epoch, int fd)
    : Mirror(Arena::create(geometry, epoch, make_doorbell()), fd), awaited_(geometry.stages), rows_(geometry.stages) {
  arena_->close_fd();
  // The client rings for every post: the thread that sends always sleeps.
  arena_->receiver_sleeping().store(1, std::memory_order_relaxed);
  start([this] { send_posts(); });
  start([this] { receive_answers(); });
}

AttentionMirror::~AttentionMirror() { close(); }

void AttentionMirror::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(arena_->doorbell(), &one, sizeof(one));
}

void AttentionMirror::send_posts() {
  std::vector<uint64_t> sent(arena_->geometry.stages, 0);
  while (!is_over()) {
    pollfd entry{arena_->doorbell(), POLLIN, 0};
    poll(&entry, 1, -1);
    uint64_t rings;
    [[maybe_unused]] const ssize_t drained = read(arena_->doorbell(), &rings, sizeof(rings));
    full_fence();
    for (int64_t stage = 0; stage < arena_->geometry.stages; ++stage) {
      const uint64_t flag = arena_->dispatch_flag(stage).load(std::memory_order_acquire);
      if (flag == sent[stage]) continue;
      sent[stage] = flag;
      send_post(stage, flag);
    }
  }
}

void AttentionMirror::send_post(int64_t stage, uint64_t flag) {
  const Geometry& geometry = arena_->geometry;
  const int32_t layer = arena_->dispatch_head(stage)[0].load(std::memory_order_relaxed);
  const int32_t rows = arena_->dispatch_head(stage)[1].load(std::memory_order_relaxed);
  rows_[stage].store(rows, std::memory_order_relaxed);
  awaited_[stage].store(flag, std::memory_order_release);
  PostHead head{flag, static_cast<int32_t>(stage), layer, rows, 0};
  const size_t routing = rows * geometry.top_k * sizeof(int32_t);
  std::array<iovec, 4> parts{
      {{&head, sizeof(head)},
       {arena_->dispatch_ids(stage), routing},
       {arena_->dispatch_weights(stage), routing},
       {arena_->dispatch_hidden(stage), static_cast<size_t>(rows * geometry.hidden_size * geometry.element_size)}}};
  connection_.send(parts.data(), parts.size());
}

void AttentionMirror::receive_answers() {
  AnswerHead head;
  while (connection_.receive(&head, sizeof(head))) {
    const Geometry& geometry = arena_->geometry;
    if (head.stage < 0 || head.stage >= geometry.stages) {
      throw ConnectionLost("F answered stage " + text(head.stage) + " of " + text(geometry.stages));
    }
    const uint64_t awaited = awaited_[head.stage].load(std::memory_order_acquire);
    const int32_t rows = rows_[head.stage].load(std::memory_order_relaxed);
    if (head.flag == 0 || head.flag != awaited || head.rows != rows) {
      throw ConnectionLost("F answered a post that it was not sent, or with another number of rows");
    }
    awaited_[head.stage].store(0, std::memory_order_relaxed);
    connection_.require(arena_->combine_partial(head.stage), rows * geometry.hidden_size * sizeof(float));
    arena_->combine_flag(head.stage).store(head.flag, std::memory_order_release);
    full_fence();
    wake_if_sleeping(arena_->combine_sleeping(head.stage));
  }
}

}  // namespace ffn
