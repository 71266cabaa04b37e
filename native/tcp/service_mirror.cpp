#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>

#include "tcp/frames.hpp"
#include "tcp/mirror.hpp"

namespace ffn {
namespace {

// The peer broke the protocol.
class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Bounds a sleep in case that a wake-up is missed while the mirror ends.
constexpr int64_t kSleepNs = 1'000'000'000;

std::string text(int64_t value) { return std::to_string(value); }

int duplicate(int fd) {
  const int copy = dup(fd);
  if (copy < 0) throw std::system_error(errno, std::generic_category(), "dup of the doorbell");
  return copy;
}

}  // namespace

ServiceMirror::ServiceMirror(std::shared_ptr<Arena> arena, int fd, int doorbell,
                             std::function<void(const std::string&)> on_fault)
    : Mirror(std::move(arena), fd),
      doorbell_(duplicate(doorbell)),
      on_fault_(std::move(on_fault)),
      expected_(arena_->geometry.stages),
      rows_(arena_->geometry.stages) {
  for (int64_t stage = 0; stage < arena_->geometry.stages; ++stage) start([this, stage] { send_answers(stage); });
  start([this] {
    try {
      receive_posts();
    } catch (const Fault& fault) {
      on_fault_(fault.what());
      throw;
    }
  });
}

ServiceMirror::~ServiceMirror() {
  close();
  ::close(doorbell_);
}

void ServiceMirror::ring() const {
  const uint64_t one = 1;
  // Fails only when the counter is full, and then F is awake.
  [[maybe_unused]] const ssize_t written = write(doorbell_, &one, sizeof(one));
}

void ServiceMirror::wake() {
  for (int64_t stage = 0; stage < arena_->geometry.stages; ++stage) {
    Word& sleeping = arena_->combine_sleeping(stage);
    sleeping.store(0, std::memory_order_release);
    futex_wake(sleeping);
  }
}

void ServiceMirror::receive_posts() {
  std::vector<uint64_t> next(arena_->geometry.stages, 1);
  PostHead head;
  while (connection_.receive(&head, sizeof(head))) {
    if (head.stage < 0 || head.stage >= arena_->geometry.stages) {
      throw Fault("a post names stage " + text(head.stage) + " of " + text(arena_->geometry.stages));
    }
    if (head.rows < 0 || head.rows > arena_->geometry.capacity) {
      throw Fault("a post of layer " + text(head.layer) + " has " + text(head.rows) + " rows, capacity is " +
                  text(arena_->geometry.capacity));
    }
    uint64_t& sequence = next[head.stage];
    if (head.flag != make_flag(arena_->epoch, sequence) || expected_[head.stage].load(std::memory_order_acquire) != 0) {
      throw Fault("a post comes out of turn");
    }
    ++sequence;
    receive_post(head.stage, head.layer, head.rows);
    rows_[head.stage].store(head.rows, std::memory_order_relaxed);
    expected_[head.stage].store(head.flag, std::memory_order_release);
    arena_->dispatch_flag(head.stage).store(head.flag, std::memory_order_release);
    full_fence();
    if (arena_->receiver_sleeping().load(std::memory_order_relaxed) != 0) ring();
  }
}

void ServiceMirror::receive_post(int64_t stage, int32_t layer, int32_t rows) {
  const Geometry& geometry = arena_->geometry;
  connection_.require(arena_->dispatch_ids(stage), rows * geometry.top_k * sizeof(int32_t));
  connection_.require(arena_->dispatch_weights(stage), rows * geometry.top_k * sizeof(float));
  connection_.require(arena_->dispatch_hidden(stage), rows * geometry.hidden_size * geometry.element_size);
  arena_->dispatch_head(stage)[0].store(layer, std::memory_order_relaxed);
  arena_->dispatch_head(stage)[1].store(rows, std::memory_order_relaxed);
}

void ServiceMirror::send_answers(int64_t stage) {
  const Flag& released = arena_->combine_flag(stage);
  Word& sleeping = arena_->combine_sleeping(stage);
  for (uint64_t sequence = 1; !is_over(); ++sequence) {
    const uint64_t flag = make_flag(arena_->epoch, sequence);
    while (released.load(std::memory_order_acquire) != flag) {
      sleeping.store(1, std::memory_order_relaxed);
      full_fence();
      if (is_over()) return;
      if (released.load(std::memory_order_acquire) != flag) futex_wait(sleeping, 1, kSleepNs);
    }
    AnswerHead head{flag, static_cast<int32_t>(stage), rows_[stage].load(std::memory_order_relaxed)};
    // Before the first byte: A posts again as soon as it has the last one.
    expected_[stage].store(0, std::memory_order_release);
    const size_t row_bytes = arena_->geometry.hidden_size * sizeof(float);
    std::array<iovec, 2> parts{{{&head, sizeof(head)}, {arena_->combine_partial(stage), head.rows * row_bytes}}};
    std::lock_guard<std::mutex> lock(sending_);
    connection_.send(parts.data(), parts.size());
  }
}

}  // namespace ffn
