// A's side: one client per Attention worker, one link per F rank.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ffn_faas/attention_table.h"
#include "shm/arena.hpp"
#include "shm/spans.hpp"

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

  // Writes the windows of all F ranks and releases their flags; more rows than capacity: the first chunk. While held it
  // writes nothing. Never blocks. One post may be outstanding per stage. Throws std::invalid_argument before anything
  // was written.
  void dispatch(const ffn_attention_call& call);
  // Waits for all F ranks, adds up in rank order, writes out [rows, hidden_size]; sends and awaits further chunks.
  // While held it waits; after resume it sends the chunk that had no answer again. call is that of dispatch. Throws
  // std::runtime_error with the reason of fail().
  void combine(const ffn_attention_call& call, void* out);

  // Any thread: F is away. Calls wait until resume or fail. Nothing happens after fail.
  void hold();
  // Any thread: F is back, with new windows (new epochs) by F rank, and its layer numbers. Posts without an answer are
  // sent again by the threads that wait for them: computed once or more, answered to the caller once.
  void resume(std::vector<std::shared_ptr<Arena>> arenas, std::vector<int32_t> layers);
  // Any thread: pending and later calls throw this reason. The first reason stays.
  void fail(const std::string& reason);

  // The longest that a call has been waiting for an answer now, in ns, and the F rank it waits for; 0 while held.
  std::pair<int64_t, int64_t> longest_wait() const;

  // What the torch ops call; valid as long as this object.
  const ffn_attention_table* table() const { return &table_; }

  std::atomic<int64_t> posts{0};    // chunks sent
  std::atomic<int64_t> resent{0};   // of these, again after F was away
  std::atomic<int64_t> wait_ns{0};  // time in combine before the last F rank had answered
  std::atomic<int64_t> sleeps{0};   // waits that outlasted the spin
  Recorder<PostSpan> spans;

 private:
  struct Link {
    std::shared_ptr<Arena> arena;
    std::vector<uint64_t> sequences;  // by stage: of its last post
  };
  // One attachment to F: replaced as a whole, so that a stage that still reads an old one is not disturbed.
  struct Attachment {
    std::vector<std::shared_ptr<Link>> links;  // by F rank
    std::vector<int32_t> layers;
  };
  struct Outstanding {
    bool active = false;
    int64_t rows = 0;
    int64_t handle = 0;
    int64_t begin = 0;  // chunk now on its way: rows begin ... end
    int64_t end = 0;
    std::shared_ptr<const Attachment> attachment;  // where the chunk was sent; null: it was not, F was away
    std::vector<std::vector<int32_t>> sent;        // by F rank: rows of the chunk it was sent, ascending
    int64_t dispatching = 0;                       // ns, where spans are recorded, else 0
    int64_t dispatched = 0;
    std::atomic<int64_t> waiting_since{0};  // ns, 0 = not
    std::atomic<int64_t> waiting_for{0};    // F rank
  };
  enum class Control { kRun, kHold, kFatal };

  void check(const ffn_attention_call& call) const;
  void check_outstanding(const ffn_attention_call& call) const;
  std::shared_ptr<Link> new_link(std::shared_ptr<Arena> arena) const;
  void replace(std::shared_ptr<const Attachment> attachment);  // under the lock
  void require_idle(const char* what) const;                   // under the lock
  void wake() const;                                           // under the lock
  std::shared_ptr<const Attachment> attachment_to_send();      // blocks while held; throws the reason of fail()
  void send_chunk(const ffn_attention_call& call, int64_t begin, std::shared_ptr<const Attachment> attachment);
  bool await_chunk(int64_t stage);  // false: it has to be sent again
  bool await_flag(const Arena& arena, const Attachment* attachment, int64_t stage, uint64_t flag);
  void keep_span(const ffn_attention_call& call, int64_t waiting, int64_t answered);
  bool is_away(const Attachment* attachment) const;  // held, or resumed elsewhere; throws the reason of fail()
  void throw_if_failed() const;

  const Geometry geometry_;
  const std::vector<int64_t> expert_counts_;
  std::vector<int64_t> first_expert_;  // by F rank, and one past the last
  const int64_t spin_ns_;
  std::vector<Outstanding> stages_;
  ffn_attention_table table_;

  // Guards attachment_, reason_, changes of control_, and Outstanding::active against other threads.
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::shared_ptr<const Attachment> attachment_;
  std::atomic<const Attachment*> current_{nullptr};  // attachment_, for a look without the lock
  std::atomic<Control> control_{Control::kRun};
  std::string reason_;
};

}  // namespace ffn
