#include "shm/chunk.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "shm/convert.hpp"

namespace ffn {
namespace {

std::string text(int64_t value) { return std::to_string(value); }

template <typename Id>
void check(const ffn_attention_call& call, Id experts) {
  const auto* ids = static_cast<const Id*>(call.ids);
  const int64_t count = call.rows * call.top_k;
  const auto* bad = std::find_if(ids, ids + count, [experts](Id id) { return id < -1 || id >= experts; });
  if (bad == ids + count) return;
  throw std::invalid_argument("row " + text((bad - ids) / call.top_k) + " names expert " + text(*bad) + " of " +
                              text(experts));
}

template <typename Id>
void fill(const ffn_attention_call& call, const Arena& arena, Id first, Id last, int64_t begin, int64_t end,
          std::vector<int32_t>& sent) {
  const int64_t top_k = call.top_k;
  const auto* ids = static_cast<const Id*>(call.ids);
  int32_t* local_ids = arena.dispatch_ids(call.stage);
  float* weights = arena.dispatch_weights(call.stage);
  sent.clear();
  for (int64_t row = begin; row < end; ++row) {
    const Id* row_ids = ids + row * top_k;
    const auto is_local = [first, last](Id id) { return id >= first && id < last; };
    if (!std::any_of(row_ids, row_ids + top_k, is_local)) continue;
    const int64_t place = static_cast<int64_t>(sent.size()) * top_k;
    for (int64_t k = 0; k < top_k; ++k) {
      const bool local = is_local(row_ids[k]);
      local_ids[place + k] = local ? static_cast<int32_t>(row_ids[k] - first) : -1;
      weights[place + k] = local ? call.weights[row * top_k + k] : 0.0f;
    }
    sent.push_back(static_cast<int32_t>(row - begin));
  }
  const int64_t row_bytes = arena.geometry.hidden_size * arena.geometry.element_size;
  const char* source = static_cast<const char*>(call.x) + begin * row_bytes;
  char* target = arena.dispatch_hidden(call.stage);
  for (size_t from = 0, to; from < sent.size(); from = to) {
    // Neighbouring rows go in one copy; with one F rank that is the whole chunk.
    for (to = from + 1; to < sent.size() && sent[to] == sent[to - 1] + 1;) ++to;
    std::memcpy(target + from * row_bytes, source + sent[from] * row_bytes, (to - from) * row_bytes);
  }
}

}  // namespace

void check_ids(const ffn_attention_call& call, int64_t experts) {
  if (call.ids_are_int64) {
    check<int64_t>(call, experts);
  } else {
    check<int32_t>(call, static_cast<int32_t>(experts));
  }
}

void fill_window(const ffn_attention_call& call, const Arena& arena, int64_t first, int64_t last, int64_t begin,
                 int64_t end, std::vector<int32_t>& sent) {
  if (call.ids_are_int64) {
    fill<int64_t>(call, arena, first, last, begin, end, sent);
  } else {
    fill<int32_t>(call, arena, static_cast<int32_t>(first), static_cast<int32_t>(last), begin, end, sent);
  }
}

void sum_partials(const ffn_attention_call& call, const std::vector<const Arena*>& arenas,
                  const std::vector<std::vector<int32_t>>& sent, int64_t begin, int64_t end, void* out) {
  const int64_t hidden = call.hidden_size;
  const int64_t row_bytes = hidden * dtype_size(call.dtype);
  char* target = static_cast<char*>(out) + begin * row_bytes;
  std::vector<size_t> next(arenas.size(), 0);
  std::vector<float> sum(hidden);
  for (int32_t row = 0; row < end - begin; ++row, target += row_bytes) {
    const float* first = nullptr;
    bool added = false;
    for (size_t rank = 0; rank < arenas.size(); ++rank) {
      const std::vector<int32_t>& rows = sent[rank];
      if (next[rank] == rows.size() || rows[next[rank]] != row) continue;
      const float* partial = arenas[rank]->combine_partial(call.stage) + next[rank]++ * hidden;
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
