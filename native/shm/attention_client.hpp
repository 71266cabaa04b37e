// A's side: one client per Attention worker, one link per F rank.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ffn_faas/attention_table.h"
#include "shm/arena.hpp"

namespace ffn {

class AttentionClient {
 public:
  // expert_counts[f]: experts per layer of F rank f; their global ids are contiguous, in rank order.
  AttentionClient(const Geometry& geometry, std::vector<int64_t> expert_counts, int64_t spin_us);
  ~AttentionClient();
  AttentionClient(const AttentionClient&) = delete;
  AttentionClient& operator=(const AttentionClient&) = delete;

  // Layer numbers on the wire, by the handle that dispatch takes. Not while a post is outstanding.
  void set_layers(std::vector<int32_t> layers);
  // Gives F rank its windows; its posts start at sequence 1. Not while a post is outstanding.
  void set_link(int64_t ffn_rank, std::shared_ptr<Arena> arena);

  // Writes the windows of all F ranks and releases their flags; more rows than capacity: the first chunk. Never blocks.
  // One post may be outstanding per stage. Throws std::invalid_argument before anything was written.
  void dispatch(const ffn_attention_call& call);
  // Waits for all F ranks, adds up in rank order, writes out [rows, hidden_size]; sends and awaits further chunks.
  // call is that of dispatch. Throws std::runtime_error with the reason of fail().
  void combine(const ffn_attention_call& call, void* out);

  // Any thread: pending and later calls throw this reason. The first reason stays.
  void fail(const std::string& reason);

  // What the torch ops call; valid as long as this object.
  const ffn_attention_table* table() const { return &table_; }

  std::atomic<int64_t> posts{0};    // chunks sent
  std::atomic<int64_t> wait_ns{0};  // time in combine before the last F rank had answered
  std::atomic<int64_t> sleeps{0};   // waits that outlasted the spin

 private:
  struct Outstanding {
    bool active = false;
    int64_t rows = 0;
    int64_t handle = 0;
    int64_t begin = 0;  // chunk now on its way: rows begin ... end
    int64_t end = 0;
    std::vector<std::vector<int32_t>> sent;  // by F rank: rows of the chunk it was sent, ascending
    std::vector<uint64_t> sequences;         // by F rank: of its last post
  };

  void check(const ffn_attention_call& call) const;
  template <typename Id>
  void check_ids(const ffn_attention_call& call) const;
  void send_chunk(const ffn_attention_call& call, int64_t begin);
  template <typename Id>
  void fill_windows(const ffn_attention_call& call, int64_t ffn_rank, Outstanding& state) const;
  void await_chunk(int64_t stage);
  void await_flag(const Arena& arena, int64_t stage, uint64_t flag);
  void sum_chunk(const ffn_attention_call& call, void* out) const;
  void throw_if_failed() const;

  const Geometry geometry_;
  const std::vector<int64_t> expert_counts_;
  std::vector<int64_t> first_expert_;  // by F rank, and one past the last
  const int64_t spin_ns_;
  std::vector<int32_t> layers_;
  std::vector<std::shared_ptr<Arena>> links_;
  std::vector<Outstanding> stages_;
  ffn_attention_table table_;

  mutable std::mutex mutex_;  // guards links_, layers_, reason_ and Outstanding::active against other threads
  std::atomic<bool> failed_{false};
  std::string reason_;
};

}  // namespace ffn
