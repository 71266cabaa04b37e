#include "shm/attention_client.hpp"

#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include "shm/chunk.hpp"
#include "shm/convert.hpp"

namespace ffn {
namespace {

// Bounds a sleep in case that the word's wake-up never comes (F killed): the control word is looked at again.
constexpr int64_t kSleepNs = 50'000'000;

template <typename Call>
int guarded(char* reason, size_t reason_size, Call&& call) {
  try {
    call();
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(reason, reason_size, "%s", error.what());
    return 1;
  }
}

int table_dispatch(void* self, const ffn_attention_call* call, char* reason, size_t reason_size) {
  return guarded(reason, reason_size, [&] { static_cast<AttentionClient*>(self)->dispatch(*call); });
}

int table_combine(void* self, const ffn_attention_call* call, void* out, char* reason, size_t reason_size) {
  return guarded(reason, reason_size, [&] { static_cast<AttentionClient*>(self)->combine(*call, out); });
}

std::string text(int64_t value) { return std::to_string(value); }

}  // namespace

AttentionClient::AttentionClient(const Geometry& geometry, std::vector<int64_t> expert_counts, int64_t spin_us)
    : geometry_(geometry),
      expert_counts_(std::move(expert_counts)),
      spin_ns_(spin_us * 1000),
      stages_(geometry.stages),
      table_{FFN_ATTENTION_TABLE_VERSION, this, table_dispatch, table_combine} {
  geometry.check();
  if (expert_counts_.empty()) throw std::invalid_argument("there must be at least one F rank");
  first_expert_.push_back(0);
  for (const int64_t count : expert_counts_) {
    if (count < 0) throw std::invalid_argument("an expert count is negative");
    first_expert_.push_back(first_expert_.back() + count);
  }
  for (Outstanding& stage : stages_) stage.sent.resize(expert_counts_.size());
  auto empty = std::make_shared<Attachment>();
  empty->links.resize(expert_counts_.size());
  replace(std::move(empty));
}

AttentionClient::~AttentionClient() = default;

void AttentionClient::set_layers(std::vector<int32_t> layers) {
  std::lock_guard<std::mutex> lock(mutex_);
  require_idle("layers");
  auto next = std::make_shared<Attachment>(*attachment_);
  next->layers = std::move(layers);
  replace(std::move(next));
}

void AttentionClient::set_link(int64_t ffn_rank, std::shared_ptr<Arena> arena) {
  if (ffn_rank < 0 || ffn_rank >= static_cast<int64_t>(expert_counts_.size())) {
    throw std::invalid_argument("there is no F rank " + text(ffn_rank) + " among " + text(expert_counts_.size()));
  }
  auto link = new_link(std::move(arena));
  std::lock_guard<std::mutex> lock(mutex_);
  require_idle("windows");
  auto next = std::make_shared<Attachment>(*attachment_);
  next->links[ffn_rank] = std::move(link);
  replace(std::move(next));
}

std::shared_ptr<AttentionClient::Link> AttentionClient::new_link(std::shared_ptr<Arena> arena) const {
  if (!(arena->geometry == geometry_)) throw std::invalid_argument("the windows have another geometry than the client");
  auto link = std::make_shared<Link>();
  link->arena = std::move(arena);
  link->sequences.resize(geometry_.stages);
  return link;
}

void AttentionClient::replace(std::shared_ptr<const Attachment> attachment) {
  attachment_ = std::move(attachment);
  current_.store(attachment_.get(), std::memory_order_release);
}

void AttentionClient::require_idle(const char* what) const {
  const auto is_active = [](const Outstanding& stage) { return stage.active; };
  if (std::any_of(stages_.begin(), stages_.end(), is_active)) {
    throw std::logic_error(std::string(what) + " cannot change while a post is outstanding");
  }
}

void AttentionClient::hold() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (control_.load() != Control::kRun) return;
  control_.store(Control::kHold, std::memory_order_release);
  wake();
}

void AttentionClient::resume(std::vector<std::shared_ptr<Arena>> arenas, std::vector<int32_t> layers) {
  auto next = std::make_shared<Attachment>();
  if (arenas.size() != expert_counts_.size()) {
    throw std::invalid_argument("windows of " + text(arenas.size()) + " F ranks, there are " +
                                text(expert_counts_.size()));
  }
  for (auto& arena : arenas) next->links.push_back(new_link(std::move(arena)));
  next->layers = std::move(layers);
  std::lock_guard<std::mutex> lock(mutex_);
  if (next->layers.size() != attachment_->layers.size()) {
    throw std::invalid_argument(text(next->layers.size()) + " layers, there were " + text(attachment_->layers.size()));
  }
  if (control_.load() == Control::kFatal) return;
  replace(std::move(next));
  control_.store(Control::kRun, std::memory_order_release);
  changed_.notify_all();
}

void AttentionClient::fail(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (control_.load() == Control::kFatal) return;
  reason_ = reason;
  control_.store(Control::kFatal, std::memory_order_release);
  wake();
}

void AttentionClient::wake() const {
  full_fence();
  for (const Outstanding& stage : stages_) {
    const Attachment* attachment = stage.active ? stage.attachment.get() : nullptr;
    for (size_t rank = 0; attachment != nullptr && rank < attachment->links.size(); ++rank) {
      wake_if_sleeping(attachment->links[rank]->arena->combine_sleeping(&stage - stages_.data()));
    }
  }
  changed_.notify_all();
}

void AttentionClient::throw_if_failed() const {
  if (control_.load(std::memory_order_acquire) != Control::kFatal) return;
  std::lock_guard<std::mutex> lock(mutex_);
  throw std::runtime_error(reason_);
}

std::pair<int64_t, int64_t> AttentionClient::longest_wait() const {
  std::pair<int64_t, int64_t> longest{0, 0};
  if (control_.load(std::memory_order_acquire) != Control::kRun) return longest;
  const int64_t now = now_ns();
  for (const Outstanding& stage : stages_) {
    const int64_t since = stage.waiting_since.load(std::memory_order_relaxed);
    if (since != 0) longest = std::max(longest, {now - since, stage.waiting_for.load(std::memory_order_relaxed)});
  }
  return longest;
}

void AttentionClient::check(const ffn_attention_call& call) const {
  if (call.stage < 0 || call.stage >= geometry_.stages) {
    throw std::invalid_argument("stage " + text(call.stage) + " was not agreed; there are " + text(geometry_.stages));
  }
  if (call.hidden_size != geometry_.hidden_size || call.top_k != geometry_.top_k) {
    throw std::invalid_argument("rows have " + text(call.hidden_size) + " elements and " + text(call.top_k) +
                                " experts, agreed were " + text(geometry_.hidden_size) + " and " +
                                text(geometry_.top_k));
  }
  if (dtype_size(call.dtype) != geometry_.element_size) {
    throw std::invalid_argument("rows have elements of " + text(dtype_size(call.dtype)) + " bytes, agreed were " +
                                text(geometry_.element_size));
  }
  if (call.rows < 0) throw std::invalid_argument("a negative number of rows");
}

void AttentionClient::check_outstanding(const ffn_attention_call& call) const {
  const Outstanding& state = stages_[call.stage];
  if (!state.active) throw std::logic_error("stage " + text(call.stage) + " has no post to combine");
  if (state.rows != call.rows || state.handle != call.handle) {
    throw std::invalid_argument("combine of " + text(call.rows) + " rows of layer " + text(call.handle) + ", but " +
                                text(state.rows) + " rows of layer " + text(state.handle) + " were dispatched");
  }
}

void AttentionClient::dispatch(const ffn_attention_call& call) {
  throw_if_failed();
  check(call);
  check_ids(call, first_expert_.back());
  Outstanding& state = stages_[call.stage];
  std::shared_ptr<const Attachment> attachment;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state.active) {
      throw std::logic_error("stage " + text(call.stage) + " has a post outstanding: combine it first");
    }
    if (call.handle < 0 || call.handle >= static_cast<int64_t>(attachment_->layers.size())) {
      throw std::invalid_argument("there is no layer " + text(call.handle) + " among " +
                                  text(attachment_->layers.size()));
    }
    for (size_t rank = 0; rank < attachment_->links.size(); ++rank) {
      if (attachment_->links[rank] == nullptr) {
        throw std::logic_error("the windows of F rank " + text(rank) + " are not set");
      }
    }
    if (control_.load() == Control::kRun) attachment = attachment_;
    state.active = true;
    state.attachment = attachment;
  }
  state.rows = call.rows;
  state.handle = call.handle;
  state.begin = 0;
  state.dispatching = 0;
  if (attachment != nullptr) send_chunk(call, 0, std::move(attachment));
}

std::shared_ptr<const AttentionClient::Attachment> AttentionClient::attachment_to_send() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return control_.load() != Control::kHold; });
  if (control_.load() == Control::kFatal) throw std::runtime_error(reason_);
  return attachment_;
}

void AttentionClient::send_chunk(const ffn_attention_call& call, int64_t begin,
                                 std::shared_ptr<const Attachment> attachment) {
  Outstanding& state = stages_[call.stage];
  const bool recorded = spans.active();
  state.dispatching = recorded ? now_ns() : 0;
  state.begin = begin;
  state.end = std::min(call.rows, begin + geometry_.capacity);
  for (size_t rank = 0; rank < attachment->links.size(); ++rank) {
    Link& link = *attachment->links[rank];
    const Arena& arena = *link.arena;
    fill_window(call, arena, first_expert_[rank], first_expert_[rank + 1], begin, state.end, state.sent[rank]);
    arena.dispatch_head(call.stage)[0].store(attachment->layers[call.handle], std::memory_order_relaxed);
    arena.dispatch_head(call.stage)[1].store(static_cast<int32_t>(state.sent[rank].size()), std::memory_order_relaxed);
    const uint64_t flag = make_flag(arena.epoch, ++link.sequences[call.stage]);
    arena.dispatch_flag(call.stage).store(flag, std::memory_order_release);
    full_fence();
    if (arena.receiver_sleeping().load(std::memory_order_relaxed) != 0) {
      const uint64_t one = 1;
      // Fails only when the counter is full, and then F is awake.
      [[maybe_unused]] const ssize_t written = write(arena.doorbell(), &one, sizeof(one));
    }
  }
  posts.fetch_add(1, std::memory_order_relaxed);
  if (recorded) state.dispatched = now_ns();
  if (state.attachment == attachment) return;
  std::lock_guard<std::mutex> lock(mutex_);
  state.attachment = std::move(attachment);
}

void AttentionClient::combine(const ffn_attention_call& call, void* out) {
  throw_if_failed();
  check(call);
  check_outstanding(call);
  Outstanding& state = stages_[call.stage];
  std::vector<const Arena*> arenas;
  for (;;) {
    int64_t waiting = state.dispatching != 0 ? now_ns() : 0;
    while (!await_chunk(call.stage)) {
      send_chunk(call, state.begin, attachment_to_send());
      resent.fetch_add(1, std::memory_order_relaxed);
      waiting = state.dispatching != 0 ? now_ns() : 0;
    }
    const int64_t answered = waiting != 0 ? now_ns() : 0;
    arenas.clear();
    for (const auto& link : state.attachment->links) arenas.push_back(link->arena.get());
    sum_partials(call, arenas, state.sent, state.begin, state.end, out);
    if (waiting != 0) keep_span(call, waiting, answered);
    if (state.end >= call.rows) break;
    send_chunk(call, state.end, attachment_to_send());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  state.active = false;
  state.attachment = nullptr;
}

void AttentionClient::keep_span(const ffn_attention_call& call, int64_t waiting, int64_t answered) {
  const Outstanding& state = stages_[call.stage];
  spans.add({state.dispatching, state.dispatched, waiting, answered, now_ns(), call.stage,
             state.attachment->layers[call.handle], state.end - state.begin});
}

bool AttentionClient::await_chunk(int64_t stage) {
  Outstanding& state = stages_[stage];
  const Attachment* attachment = state.attachment.get();
  if (attachment == nullptr) return false;
  const int64_t start = now_ns();
  bool answered = true;
  state.waiting_for.store(0, std::memory_order_relaxed);
  state.waiting_since.store(start, std::memory_order_relaxed);
  for (size_t rank = 0; answered && rank < attachment->links.size(); ++rank) {
    const Link& link = *attachment->links[rank];
    state.waiting_for.store(static_cast<int64_t>(rank), std::memory_order_relaxed);
    answered = await_flag(*link.arena, attachment, stage, make_flag(link.arena->epoch, link.sequences[stage]));
  }
  state.waiting_since.store(0, std::memory_order_relaxed);
  wait_ns.fetch_add(now_ns() - start, std::memory_order_relaxed);
  return answered;
}

bool AttentionClient::is_away(const Attachment* attachment) const {
  throw_if_failed();
  return control_.load(std::memory_order_acquire) != Control::kRun ||
         current_.load(std::memory_order_acquire) != attachment;
}

bool AttentionClient::await_flag(const Arena& arena, const Attachment* attachment, int64_t stage, uint64_t flag) {
  const Flag& answered = arena.combine_flag(stage);
  const auto ready = [&] { return answered.load(std::memory_order_acquire) == flag; };
  if (ready()) return true;
  const int64_t spin_deadline = now_ns() + spin_ns_;
  do {
    pause_cpu();
    if (ready()) return true;
    if (is_away(attachment)) return false;
  } while (now_ns() < spin_deadline);
  sleeps.fetch_add(1, std::memory_order_relaxed);
  Word& sleeping = arena.combine_sleeping(stage);
  for (;;) {
    sleeping.store(1, std::memory_order_relaxed);
    full_fence();
    const bool done = ready();
    if (!done && control_.load(std::memory_order_acquire) == Control::kRun) futex_wait(sleeping, 1, kSleepNs);
    sleeping.store(0, std::memory_order_relaxed);
    if (done || ready()) return true;
    if (is_away(attachment)) return false;
  }
}

}  // namespace ffn
