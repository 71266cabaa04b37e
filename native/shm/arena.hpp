// The memory of one link: created and sealed by F, mapped by A, gone with its last mapping.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "shm/layout.hpp"
#include "shm/sync.hpp"

namespace ffn {

class Arena {
 public:
  // F: anonymous shared memory of the geometry's size, sealed against resizing. Takes over doorbell, which only A
  // needs, also when it throws: std::system_error.
  static std::shared_ptr<Arena> create(const Geometry& geometry, uint64_t epoch, int doorbell = -1);

  // A: maps what F sent and takes over both descriptors, also when it throws. std::invalid_argument says which of size,
  // seals, geometry or epoch is not what was agreed.
  static std::shared_ptr<Arena> map(int fd, int doorbell, const Geometry& geometry, uint64_t epoch);

  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  const Geometry geometry;
  const Layout layout;
  const uint64_t epoch;

  int fd() const { return fd_; }
  void close_fd();  // the mapping stays
  int doorbell() const { return doorbell_; }
  char* base() const { return base_; }
  int64_t nbytes() const { return layout.nbytes; }

  Word& receiver_sleeping() const { return at<Word>(layout.receiver_sleeping); }
  Flag& dispatch_flag(int64_t stage) const { return at<Flag>(layout.stage(stage) + layout.dispatch_flag); }
  // [layer, rows]; atomic because a peer that breaks the protocol may write while we read.
  std::atomic<int32_t>* dispatch_head(int64_t stage) const {
    return &at<std::atomic<int32_t>>(layout.stage(stage) + layout.dispatch_layer);
  }
  int32_t* dispatch_ids(int64_t stage) const { return &at<int32_t>(layout.stage(stage) + layout.dispatch_ids); }
  float* dispatch_weights(int64_t stage) const { return &at<float>(layout.stage(stage) + layout.dispatch_weights); }
  char* dispatch_hidden(int64_t stage) const { return base_ + layout.stage(stage) + layout.dispatch_hidden; }
  Flag& combine_flag(int64_t stage) const { return at<Flag>(layout.stage(stage) + layout.combine_flag); }
  Word& combine_sleeping(int64_t stage) const { return at<Word>(layout.stage(stage) + layout.combine_sleeping); }
  float* combine_partial(int64_t stage) const { return &at<float>(layout.stage(stage) + layout.combine_partial); }

  // Any thread. Windows that are carried elsewhere (tcp/mirror.hpp): why that has ended; the first reason stays.
  void fail(const std::string& reason);
  std::string failure() const;  // empty while there is none

  // Test hook: NaN into rows, weights and partials, wild numbers into ids, layer and count. No post may be outstanding.
  void poison() const;

 private:
  Arena(const Geometry& geometry, uint64_t epoch);
  void map_memory();

  template <typename T>
  T& at(int64_t offset) const {
    return *reinterpret_cast<T*>(base_ + offset);
  }

  char* base_ = nullptr;
  int fd_ = -1;
  int doorbell_ = -1;
  mutable std::mutex mutex_;
  std::string failure_;
};

}  // namespace ffn
