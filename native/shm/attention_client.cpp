#include "shm/attention_client.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>

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
      links_(expert_counts_.size()),
      stages_(geometry.stages),
      table_{FFN_ATTENTION_TABLE_VERSION, this, table_dispatch, table_combine} {
  geometry.check();
  if (expert_counts_.empty()) throw std::invalid_argument("there must be at least one F rank");
  first_expert_.push_back(0);
  for (const int64_t count : expert_counts_) {
    if (count < 0) throw std::invalid_argument("an expert count is negative");
    first_expert_.push_back(first_expert_.back() + count);
  }
  for (Outstanding& stage : stages_) {
    stage.sent.resize(expert_counts_.size());
    stage.sequences.resize(expert_counts_.size());
  }
}

AttentionClient::~AttentionClient() = default;

void AttentionClient::set_layers(std::vector<int32_t> layers) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Outstanding& stage : stages_) {
    if (stage.active) throw std::logic_error("layers cannot change while a post is outstanding");
  }
  layers_ = std::move(layers);
}

void AttentionClient::set_link(int64_t ffn_rank, std::shared_ptr<Arena> arena) {
  if (ffn_rank < 0 || ffn_rank >= static_cast<int64_t>(links_.size())) {
    throw std::invalid_argument("there is no F rank " + text(ffn_rank) + " among " + text(links_.size()));
  }
  if (!(arena->geometry == geometry_)) throw std::invalid_argument("the windows have another geometry than the client");
  std::lock_guard<std::mutex> lock(mutex_);
  for (Outstanding& stage : stages_) {
    if (stage.active) throw std::logic_error("windows cannot change while a post is outstanding");
    stage.sequences[ffn_rank] = 0;
  }
  links_[ffn_rank] = std::move(arena);
}

void AttentionClient::fail(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failed_.load()) return;
  reason_ = reason;
  failed_.store(true, std::memory_order_release);
  full_fence();
  for (const auto& arena : links_) {
    for (int64_t stage = 0; arena != nullptr && stage < geometry_.stages; ++stage) {
      wake_if_sleeping(arena->combine_sleeping(stage));
    }
  }
}

void AttentionClient::throw_if_failed() const {
  if (!failed_.load(std::memory_order_acquire)) return;
  std::lock_guard<std::mutex> lock(mutex_);
  throw std::runtime_error(reason_);
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

template <typename Id>
void AttentionClient::check_ids(const ffn_attention_call& call) const {
  const auto* ids = static_cast<const Id*>(call.ids);
  const auto experts = static_cast<Id>(first_expert_.back());
  const int64_t count = call.rows * call.top_k;
  const auto* bad = std::find_if(ids, ids + count, [experts](Id id) { return id < -1 || id >= experts; });
  if (bad == ids + count) return;
  throw std::invalid_argument("row " + text((bad - ids) / call.top_k) + " names expert " + text(*bad) + " of " +
                              text(experts));
}

void AttentionClient::dispatch(const ffn_attention_call& call) {
  throw_if_failed();
  check(call);
  if (call.ids_are_int64) {
    check_ids<int64_t>(call);
  } else {
    check_ids<int32_t>(call);
  }
  Outstanding& state = stages_[call.stage];
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state.active) {
      throw std::logic_error("stage " + text(call.stage) + " has a post outstanding: combine it first");
    }
    if (call.handle < 0 || call.handle >= static_cast<int64_t>(layers_.size())) {
      throw std::invalid_argument("there is no layer " + text(call.handle) + " among " + text(layers_.size()));
    }
    for (size_t rank = 0; rank < links_.size(); ++rank) {
      if (links_[rank] == nullptr) throw std::logic_error("the windows of F rank " + text(rank) + " are not set");
    }
    state.active = true;
  }
  state.rows = call.rows;
  state.handle = call.handle;
  send_chunk(call, 0);
}

template <typename Id>
void AttentionClient::fill_windows(const ffn_attention_call& call, int64_t ffn_rank, Outstanding& state) const {
  const Arena& arena = *links_[ffn_rank];
  const int64_t top_k = call.top_k;
  const auto first = static_cast<Id>(first_expert_[ffn_rank]);
  const auto last = static_cast<Id>(first_expert_[ffn_rank + 1]);
  const auto* ids = static_cast<const Id*>(call.ids);
  int32_t* local_ids = arena.dispatch_ids(call.stage);
  float* weights = arena.dispatch_weights(call.stage);
  std::vector<int32_t>& sent = state.sent[ffn_rank];
  sent.clear();
  for (int64_t row = state.begin; row < state.end; ++row) {
    const Id* row_ids = ids + row * top_k;
    const auto is_local = [first, last](Id id) { return id >= first && id < last; };
    if (!std::any_of(row_ids, row_ids + top_k, is_local)) continue;
    const int64_t place = static_cast<int64_t>(sent.size()) * top_k;
    for (int64_t k = 0; k < top_k; ++k) {
      const bool local = is_local(row_ids[k]);
      local_ids[place + k] = local ? static_cast<int32_t>(row_ids[k] - first) : -1;
      weights[place + k] = local ? call.weights[row * top_k + k] : 0.0f;
    }
    sent.push_back(static_cast<int32_t>(row - state.begin));
  }
  const int64_t row_bytes = geometry_.hidden_size * geometry_.element_size;
  const char* source = static_cast<const char*>(call.x) + state.begin * row_bytes;
  char* target = arena.dispatch_hidden(call.stage);
  for (size_t from = 0, to; from < sent.size(); from = to) {
    // Neighbouring rows go in one copy; with one F rank that is the whole chunk.
    for (to = from + 1; to < sent.size() && sent[to] == sent[to - 1] + 1;) ++to;
    std::memcpy(target + from * row_bytes, source + sent[from] * row_bytes, (to - from) * row_bytes);
  }
}

void AttentionClient::send_chunk(const ffn_attention_call& call, int64_t begin) {
  Outstanding& state = stages_[call.stage];
  state.begin = begin;
  state.end = std::min(call.rows, begin + geometry_.capacity);
  for (size_t rank = 0; rank < links_.size(); ++rank) {
    if (call.ids_are_int64) {
      fill_windows<int64_t>(call, rank, state);
    } else {
      fill_windows<int32_t>(call, rank, state);
    }
    const Arena& arena = *links_[rank];
    arena.dispatch_head(call.stage)[0].store(layers_[call.handle], std::memory_order_relaxed);
    arena.dispatch_head(call.stage)[1].store(static_cast<int32_t>(state.sent[rank].size()), std::memory_order_relaxed);
    const uint64_t flag = make_flag(arena.epoch, ++state.sequences[rank]);
    arena.dispatch_flag(call.stage).store(flag, std::memory_order_release);
    full_fence();
    if (arena.receiver_sleeping().load(std::memory_order_relaxed) != 0) {
      const uint64_t one = 1;
      // Fails only when the counter is full, and then F is awake.
      [[maybe_unused]] const ssize_t written = write(arena.doorbell(), &one, sizeof(one));
    }
  }
  posts.fetch_add(1, std::memory_order_relaxed);
}

void AttentionClient::combine(const ffn_attention_call& call, void* out) {
  throw_if_failed();
  check(call);
  Outstanding& state = stages_[call.stage];
  if (!state.active) throw std::logic_error("stage " + text(call.stage) + " has no post to combine");
  if (state.rows != call.rows || state.handle != call.handle) {
    throw std::invalid_argument("combine of " + text(call.rows) + " rows of layer " + text(call.handle) + ", but " +
                                text(state.rows) + " rows of layer " + text(state.handle) + " were dispatched");
  }
  for (;;) {
    await_chunk(call.stage);
    sum_chunk(call, out);
    if (state.end >= call.rows) break;
    send_chunk(call, state.end);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  state.active = false;
}

void AttentionClient::await_chunk(int64_t stage) {
  const int64_t start = now_ns();
  const Outstanding& state = stages_[stage];
  for (size_t rank = 0; rank < links_.size(); ++rank) {
    await_flag(*links_[rank], stage, make_flag(links_[rank]->epoch, state.sequences[rank]));
  }
  wait_ns.fetch_add(now_ns() - start, std::memory_order_relaxed);
}

void AttentionClient::await_flag(const Arena& arena, int64_t stage, uint64_t flag) {
  const Flag& answered = arena.combine_flag(stage);
  const auto ready = [&] { return answered.load(std::memory_order_acquire) == flag; };
  if (ready()) return;
  const int64_t spin_deadline = now_ns() + spin_ns_;
  do {
    pause_cpu();
    if (ready()) return;
    throw_if_failed();
  } while (now_ns() < spin_deadline);
  sleeps.fetch_add(1, std::memory_order_relaxed);
  Word& sleeping = arena.combine_sleeping(stage);
  for (;;) {
    sleeping.store(1, std::memory_order_relaxed);
    full_fence();
    const bool done = ready();
    if (!done && !failed_.load(std::memory_order_acquire)) futex_wait(sleeping, 1, kSleepNs);
    sleeping.store(0, std::memory_order_relaxed);
    if (done || ready()) return;
    throw_if_failed();
  }
}

void AttentionClient::sum_chunk(const ffn_attention_call& call, void* out) const {
  const Outstanding& state = stages_[call.stage];
  const int64_t hidden = geometry_.hidden_size;
  const int64_t row_bytes = hidden * dtype_size(call.dtype);
  char* target = static_cast<char*>(out) + state.begin * row_bytes;
  std::vector<size_t> next(links_.size(), 0);
  std::vector<float> sum(hidden);
  for (int32_t row = 0; row < state.end - state.begin; ++row, target += row_bytes) {
    const float* first = nullptr;
    bool added = false;
    for (size_t rank = 0; rank < links_.size(); ++rank) {
      const std::vector<int32_t>& sent = state.sent[rank];
      if (next[rank] == sent.size() || sent[next[rank]] != row) continue;
      const float* partial = links_[rank]->combine_partial(call.stage) + next[rank]++ * hidden;
      if (first == nullptr) {
        first = partial;
        continue;
      }
      if (!added) std::memcpy(sum.data(), first, hidden * sizeof(float));
      add_row(sum.data(), partial, hidden);
      added = true;
    }
    if (first == nullptr) {
      std::memset(target, 0, row_bytes);
    } else {
      store_row(added ? sum.data() : first, target, hidden, call.dtype);
    }
  }
}

}  // namespace ffn
