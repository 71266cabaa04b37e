// The CPU expert kernel: packed weights of all layers, and the computation of an item over all threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "experts_cpu/layout.hpp"
#include "experts_cpu/path.hpp"
#include "experts_cpu/thread_pool.hpp"
#include "ffn_faas/expert_kernel.h"

namespace ffn::cpu {

// Anonymous memory in huge pages where the system has them; pages are taken when written. Throws std::bad_alloc.
class Memory {
 public:
  explicit Memory(int64_t nbytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* data() const { return data_; }
  int64_t nbytes() const { return nbytes_; }

 private:
  char* data_;
  int64_t nbytes_;
};

// One item, cut into jobs (an expert and some of its rows), a job into tasks (one gate_up panel, a few down panels).
// Threads take tasks in one fixed order; a task waits for what it reads. A row's sum takes its experts in ascending
// order, so no result depends on who computes, nor on the other rows.
class Experts {
 public:
  // `path` as dispatch.hpp. Throws std::invalid_argument, std::bad_alloc.
  Experts(int64_t layers, int64_t experts, const Layout& layout, int threads, const std::string& path);

  // Any number of threads, each with a matrix of its own. Throws std::out_of_range.
  void pack(int64_t layer, int64_t expert, Matrix which, const void* matrix);
  void unpack(int64_t layer, int64_t expert, Matrix which, void* matrix) const;

  // See ffn_expert_kernel; 1 when memory ran out, 2 when the item is not of this model.
  int compute(const ffn_item& item);

  const Layout& layout() const { return layout_; }
  const Path& path() const { return path_; }
  int64_t weight_bytes() const { return weights_.nbytes(); }
  ThreadPool& pool() { return pool_; }

 private:
  struct Job {
    const char* weights;
    int64_t begin, rows;  // in the sorted slots
  };
  struct Stage {
    bool down;
    int64_t job;
    int64_t first_task, tasks;
  };
  struct Block {
    int64_t begin;
    int rows;
  };
  struct alignas(64) Scratch {  // of one thread
    std::unique_ptr<Memory> x, sums;
    int64_t gathered = -1;
  };
  char* expert_memory(int64_t layer, int64_t expert) const;
  void sort(const ffn_item& item);
  void plan(int64_t layer);
  void reserve(int64_t rows_of_job);
  void work(int worker);
  bool many(const Job& job) const;
  int64_t panels_per_task(bool down, const Job& job) const;
  int64_t panels(bool down) const { return down ? layout_.down_panels : layout_.gate_up_panels; }
  const char* panel(bool down, const Job& job, int64_t index) const;
  Ahead ahead(const char* next, const char* otherwise) const;
  int64_t pair_bytes() const;
  void run_task(Scratch& scratch, const Stage& stage, int64_t task, const char* next);
  void gather(Scratch& scratch, const Job& job, int64_t number);
  void few_rows(Scratch& scratch, const Stage& stage, int64_t index, const char* next);
  void many_rows(Scratch& scratch, const Stage& stage, int64_t begin, int64_t end, const char* next);
  const char* input(const Scratch& scratch, const Stage& stage, const Block& part) const;
  char* output(const Stage& stage, const Block& part, int64_t index) const;
  Target target(const Job& job, const Block& part, int64_t index) const;
  Block block(const Job& job, int64_t index) const;
  int64_t blocks(const Job& job) const { return ceil_div(job.rows, path_.max_rows); }
  char* activations(int64_t job) const;

  const Layout layout_;
  const int64_t layers_, experts_;
  const Path& path_;
  const int64_t x_row_bytes_, activation_row_bytes_;
  Memory weights_;
  std::vector<Scratch> scratch_;
  std::unique_ptr<Memory> activations_;  // kRing jobs
  int64_t reserved_rows_ = 0;

  // Of the item being computed:
  const ffn_item* item_ = nullptr;
  std::vector<int64_t> counts_;  // by expert: where its slots begin
  std::vector<int64_t> rows_;    // by sorted slot
  std::vector<float> scales_;
  std::vector<uint8_t> first_, seen_;
  std::vector<Job> jobs_;
  std::vector<Stage> stages_;
  std::unique_ptr<std::atomic<int64_t>[]> done_;  // tasks done: gate_up, down of each job
  int64_t done_size_ = 0;
  alignas(64) std::atomic<int64_t> cursor_{0};

  ThreadPool pool_;  // last: its threads use the rest
};

}  // namespace ffn::cpu
