// What one step computes: one post, several posts of a layer side by side, or a part of a post.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "ffn_faas/expert_kernel.h"
#include "shm/arena.hpp"
#include "shm/counters.hpp"

namespace ffn {

struct Link {
  // Of the receiving thread, but for the atomic ones.
  struct Stage {
    uint64_t next_sequence = 1;
    std::atomic<bool> in_flight{false};
    std::atomic<int64_t> active_ns{0};  // when a post was opened or answered last
    // The open post: checked, its ids and weights copied, `taken` of its rows handed out so far.
    bool open = false;
    int32_t layer = -1;         // of the last post, once it is answered
    int32_t layer_before = -1;  // of the post before that
    int64_t rows = 0;
    int64_t taken = 0;
    std::vector<int32_t> ids;
    std::vector<float> weights;
  };

  Link(int64_t link_key, std::shared_ptr<Arena> memory, std::vector<int32_t> counts)
      : key(link_key), arena(std::move(memory)), expert_counts(std::move(counts)), stages(arena->geometry.stages) {
    for (Stage& stage : stages) {
      stage.ids.resize(arena->geometry.capacity * arena->geometry.top_k);
      stage.weights.resize(stage.ids.size());
    }
  }

  const int64_t key;
  const std::shared_ptr<Arena> arena;
  const std::vector<int32_t> expert_counts;  // by layer
  std::vector<Stage> stages;
  std::atomic<bool> closed{false};
};

// Where rows of merged posts lie side by side; one item at a time. Pages are taken when written.
class Workspace {
 public:
  Workspace(const Geometry& geometry, int64_t rows);
  bool fits(const Geometry& geometry) const;

  const Geometry geometry;  // capacity is the item limit
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  const std::unique_ptr<char, Free> hidden;
  const std::unique_ptr<int32_t, Free> ids;
  const std::unique_ptr<float, Free> weights;
  const std::unique_ptr<float, Free> partial;
  std::atomic<bool> in_use{false};
};

// Rows begin ... begin + rows of a link's open post.
struct Part {
  std::shared_ptr<Link> link;
  int64_t stage;
  int64_t begin;
  int64_t rows;
  uint64_t sequence;  // of the post that this part ends; 0 = more of it follows
};

// Taken for computing; keeps the links' memory alive.
class Item {
 public:
  // One part is computed in its windows; several are copied into workspace, which they hold until complete.
  Item(std::vector<Part> parts, int32_t layer, std::shared_ptr<Workspace> workspace,
       std::shared_ptr<Counters> counters);
  ~Item();
  Item(const Item&) = delete;
  Item& operator=(const Item&) = delete;

  // Copies partial rows of merged posts back and releases the combine flags. Throws std::logic_error the second time.
  void complete();

  ffn_item view() const;  // link and stage are those of the first part
  int64_t taken_at() const { return taken_at_; }

  const std::vector<Part> parts;
  const int32_t layer;
  const int64_t rows;

 private:
  void gather() const;
  void answer(const Part& part, int64_t first_row, int64_t now) const;

  const std::shared_ptr<Workspace> workspace_;  // null with one part
  const std::shared_ptr<Counters> counters_;
  const int64_t taken_at_;
  const bool recorded_;
  int64_t gathered_at_ = 0;        // where recorded
  mutable int64_t sorted_at_ = 0;  // where recorded, by the kernel
  std::atomic<bool> completed_{false};
};

}  // namespace ffn
