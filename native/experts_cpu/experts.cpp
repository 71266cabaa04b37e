#include "experts_cpu/experts.hpp"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "experts_cpu/dispatch.hpp"
#include "shm/sync.hpp"

namespace ffn::cpu {
namespace {

constexpr int64_t kRing = 3;         // jobs whose activations are kept: one being written, one read, one between
constexpr int64_t kRowsOfJob = 192;  // bounds scratch memory; weights are read again for every so many rows
constexpr int64_t kTaskBytes = 96 << 10;
constexpr int64_t kManyBlocks = 3;   // of rows: from here on k is cut for the caches
constexpr int64_t kManyPanels = 8;   // of a task then: as often are rows read from cache rather than from memory
constexpr int64_t kManyPairs = 128;  // of k: a block's rows and a panel of so many stay in L1

void wait_for(const std::atomic<int64_t>& done, int64_t wanted) {
  for (int spins = 0; done.load(std::memory_order_acquire) < wanted; ++spins) {
    spins < 4000 ? pause_cpu() : static_cast<void>(sched_yield());
  }
}

}  // namespace

Memory::Memory(int64_t nbytes) : nbytes_(nbytes) {
  void* data = mmap(nullptr, std::max<int64_t>(nbytes, 1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  madvise(data, nbytes, MADV_HUGEPAGE);  // an advice: systems without huge pages refuse it
  data_ = static_cast<char*>(data);
}

Memory::~Memory() { munmap(data_, std::max<int64_t>(nbytes_, 1)); }

Experts::Experts(int64_t layers, int64_t experts, const Layout& layout, int threads, const std::string& path)
    : layout_(layout),
      layers_(layers),
      experts_(experts),
      path_(choose_path(layout.type, path)),
      x_row_bytes_(ceil_div(layout.hidden, path_.chunk) * path_.chunk * path_.activation_size),
      activation_row_bytes_(ceil_div(layout.gate_up_panels * kColumns, path_.chunk) * path_.chunk *
                            path_.activation_size),
      weights_(layers * experts * layout.expert_bytes),
      scratch_(threads),
      counts_(experts + 1),
      pool_(threads) {}

char* Experts::expert_memory(int64_t layer, int64_t expert) const {
  if (layer < 0 || layer >= layers_ || expert < 0 || expert >= experts_) {
    throw std::out_of_range("no expert " + std::to_string(expert) + " in layer " + std::to_string(layer));
  }
  return weights_.data() + (layer * experts_ + expert) * layout_.expert_bytes;
}

void Experts::pack(int64_t layer, int64_t expert, Matrix which, const void* matrix) {
  layout_.pack(which, matrix, expert_memory(layer, expert));
}

void Experts::unpack(int64_t layer, int64_t expert, Matrix which, void* matrix) const {
  layout_.unpack(which, matrix, expert_memory(layer, expert));
}

int Experts::compute(const ffn_item& item) {
  if (item.layer < 0 || item.layer >= layers_ || item.hidden_size != layout_.hidden ||
      item.element_size != size_of(layout_.type)) {
    return 2;
  }
  try {
    item_ = &item;
    sort(item);
    plan(item.layer);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  if (item.sorted_at != nullptr) *item.sorted_at = now_ns();
  if (jobs_.empty()) return 0;
  pool_.run([](void* self, int worker) { static_cast<Experts*>(self)->work(worker); }, this);
  return 0;
}

// Slots (row, k) in ascending order of expert, then row, then k. Rows without an expert are zeroed here.
void Experts::sort(const ffn_item& item) {
  const int64_t slots = item.rows * item.top_k;
  std::fill(counts_.begin(), counts_.end(), 0);
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (item.expert_ids[slot] >= 0) ++counts_[item.expert_ids[slot] + 1];
  }
  for (int64_t expert = 0; expert < experts_; ++expert) counts_[expert + 1] += counts_[expert];
  const int64_t used = counts_[experts_];
  if (static_cast<int64_t>(rows_.size()) < used) {
    rows_.resize(used);
    scales_.resize(used);
    first_.resize(used);
  }
  seen_.assign(item.rows, 0);
  std::vector<int64_t>& next = counts_;  // where the next slot of an expert goes; afterwards, where its slots end
  for (int64_t row = 0, slot = 0; row < item.rows; ++row) {
    for (int64_t k = 0; k < item.top_k; ++k, ++slot) {
      const int32_t expert = item.expert_ids[slot];
      if (expert < 0) continue;
      const int64_t at = next[expert]++;
      rows_[at] = row;
      scales_[at] = item.weights[slot];
      seen_[row] = 1;
    }
    if (!seen_[row]) std::memset(item.partial + row * layout_.hidden, 0, layout_.hidden * sizeof(float));
  }
  for (int64_t slot = 0; slot < used; ++slot) {
    first_[slot] = seen_[rows_[slot]];
    seen_[rows_[slot]] = 0;
  }
}

void Experts::plan(int64_t layer) {
  jobs_.clear();
  stages_.clear();
  int64_t largest = 0;
  for (int64_t expert = 0, begin = 0; expert < experts_; begin = counts_[expert++]) {
    const int64_t rows = counts_[expert] - begin;
    const int64_t parts = ceil_div(rows, kRowsOfJob);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t from = rows * part / parts, to = rows * (part + 1) / parts;
      jobs_.push_back({expert_memory(layer, expert), begin + from, to - from});
      largest = std::max(largest, to - from);
    }
  }
  reserve(largest);
  const int64_t jobs = jobs_.size();
  int64_t tasks = 0;
  const auto add = [&](bool is_down, int64_t job) {
    if (job < 0 || job >= jobs) return;
    stages_.push_back({is_down, job, tasks, ceil_div(panels(is_down), panels_per_task(is_down, jobs_[job]))});
    tasks += stages_.back().tasks;
  };
  // A job's down stands one gate_up after its own gate_up, so that hardly anything is ever waited for.
  for (int64_t job = 0; job <= jobs; ++job) {
    add(false, job);
    add(true, job - 1);
  }
  if (done_size_ < 2 * jobs) {
    done_ = std::make_unique<std::atomic<int64_t>[]>(2 * jobs);
    done_size_ = 2 * jobs;
  }
  for (int64_t i = 0; i < 2 * jobs; ++i) done_[i].store(0, std::memory_order_relaxed);
  cursor_.store(0, std::memory_order_relaxed);
}

void Experts::reserve(int64_t rows) {
  for (Scratch& scratch : scratch_) scratch.gathered = -1;
  if (rows <= reserved_rows_) return;
  rows = std::min(kRowsOfJob, std::max(rows, 2 * reserved_rows_));
  for (Scratch& scratch : scratch_) {
    scratch.x = std::make_unique<Memory>(rows * x_row_bytes_);
    if (path_.finish_down == nullptr) continue;
    scratch.sums = std::make_unique<Memory>(kManyPanels * rows * 2 * kColumns * sizeof(float));
  }
  activations_ = std::make_unique<Memory>(kRing * rows * activation_row_bytes_);
  reserved_rows_ = rows;
}

char* Experts::activations(int64_t job) const {
  return activations_->data() + job % kRing * reserved_rows_ * activation_row_bytes_;
}

// As even as can be: a register block runs at full speed from about six rows on.
Experts::Block Experts::block(const Job& job, int64_t index) const {
  const int64_t count = blocks(job);
  const int64_t begin = job.rows * index / count;
  return {begin, static_cast<int>(job.rows * (index + 1) / count - begin)};
}

bool Experts::many(const Job& job) const { return path_.finish_down != nullptr && blocks(job) >= kManyBlocks; }

int64_t Experts::panels_per_task(bool down, const Job& job) const {
  if (many(job)) return kManyPanels;
  return std::max<int64_t>(1, kTaskBytes / (down ? layout_.down_panel_bytes : layout_.gate_up_panel_bytes));
}

const char* Experts::panel(bool down, const Job& job, int64_t index) const {
  if (!down) return job.weights + index * layout_.gate_up_panel_bytes;
  return job.weights + layout_.gate_up_panels * layout_.gate_up_panel_bytes + index * layout_.down_panel_bytes;
}

// Takes one task ahead, so that its first panel can be fetched while the one before is computed.
void Experts::work(int worker) {
  const int64_t tasks = stages_.back().first_task + stages_.back().tasks;
  size_t next_stage = 0;
  const auto claim = [&] {
    const int64_t task = cursor_.fetch_add(1, std::memory_order_relaxed);
    while (task < tasks && task >= stages_[next_stage].first_task + stages_[next_stage].tasks) ++next_stage;
    return task;
  };
  for (int64_t task = claim(); task < tasks;) {
    const Stage& stage = stages_[next_stage];
    const int64_t upcoming = claim();
    const char* next = nullptr;
    if (upcoming < tasks) {
      const Stage& after = stages_[next_stage];
      const Job& job = jobs_[after.job];
      next = panel(after.down, job, (upcoming - after.first_task) * panels_per_task(after.down, job));
    }
    run_task(scratch_[worker], stage, task - stage.first_task, next);
    task = upcoming;
  }
  if (path_.leave != nullptr) path_.leave();
}

void Experts::run_task(Scratch& scratch, const Stage& stage, int64_t task, const char* next) {
  const int64_t number = stage.job;
  const Job& job = jobs_[number];
  if (stage.down) {
    wait_for(done_[2 * number], layout_.gate_up_panels);
    if (number > 0) wait_for(done_[2 * (number - 1) + 1], layout_.down_panels);
  } else {
    if (number >= kRing) wait_for(done_[2 * (number - kRing) + 1], layout_.down_panels);
    gather(scratch, job, number);
  }
  const int64_t step = panels_per_task(stage.down, job);
  const int64_t begin = task * step, end = std::min(panels(stage.down), begin + step);
  if (many(job)) {
    many_rows(scratch, stage, begin, end, next);
  } else {
    for (int64_t index = begin; index < end; ++index) {
      few_rows(scratch, stage, index, index + 1 < end ? panel(stage.down, job, index + 1) : next);
    }
  }
  done_[2 * number + stage.down].fetch_add(end - begin, std::memory_order_release);
}

void Experts::gather(Scratch& scratch, const Job& job, int64_t number) {
  if (scratch.gathered == number) return;
  for (int64_t i = 0; i < blocks(job); ++i) {
    const Block part = block(job, i);
    path_.gather(item_->hidden, layout_.hidden, rows_.data() + job.begin + part.begin, part.rows,
                 scratch.x->data() + part.begin * x_row_bytes_);
  }
  scratch.gathered = number;
}

const char* Experts::input(const Scratch& scratch, const Stage& stage, const Block& part) const {
  return stage.down ? activations(stage.job) + part.begin * activation_row_bytes_
                    : scratch.x->data() + part.begin * x_row_bytes_;
}

char* Experts::output(const Stage& stage, const Block& part, int64_t index) const {
  const int64_t column = index * kColumns, within = column % path_.chunk;
  return activations(stage.job) + part.begin * activation_row_bytes_ +
         ((column - within) * part.rows + within) * path_.activation_size;
}

Target Experts::target(const Job& job, const Block& part, int64_t index) const {
  const int64_t column = index * 2 * kColumns, slot = job.begin + part.begin;
  return {item_->partial + column, layout_.hidden,        std::min(2 * kColumns, layout_.hidden - column),
          rows_.data() + slot,     scales_.data() + slot, first_.data() + slot};
}

// The panel at `next`, if there is one, at the pace at which a panel is read.
Ahead Experts::ahead(const char* next, const char* otherwise) const {
  return next != nullptr ? Ahead{next, pair_bytes()} : Ahead{otherwise, 0};
}

int64_t Experts::pair_bytes() const { return 4 * kColumns * size_of(layout_.type); }

// Weights are widened on their way into registers, and read once.
void Experts::few_rows(Scratch& scratch, const Stage& stage, int64_t index, const char* next) {
  const Job& job = jobs_[stage.job];
  const int64_t pairs = stage.down ? layout_.inter_pairs : layout_.hidden_pairs;
  const char* weights = panel(stage.down, job, index);
  const Ahead whole = ahead(next, weights);
  for (int64_t i = 0, count = blocks(job); i < count; ++i) {
    const Block part = block(job, i);
    const Ahead share = whole.part(i, count, pairs);
    const char* x = input(scratch, stage, part);
    if (stage.down) {
      path_.down[part.rows - 1](weights, pairs, x, target(job, part, index), share);
    } else {
      path_.gate_up[part.rows - 1](weights, pairs, x, output(stage, part, index), layout_.inter - index * kColumns,
                                   share);
    }
  }
}

// Cuts k, so that a stretch of all rows, of a panel and of the sums stay in cache.
void Experts::many_rows(Scratch& scratch, const Stage& stage, int64_t begin, int64_t end, const char* next) {
  const Job& job = jobs_[stage.job];
  const int64_t pairs = stage.down ? layout_.inter_pairs : layout_.hidden_pairs;
  const int64_t count = blocks(job);
  const auto sums_of = [&](int64_t index, const Block& part) {
    return reinterpret_cast<float*>(scratch.sums->data()) + ((index - begin) * job.rows + part.begin) * 2 * kColumns;
  };
  for (int64_t from = 0; from < pairs; from += kManyPairs) {
    const int64_t step = std::min(kManyPairs, pairs - from);
    for (int64_t index = begin; index < end; ++index) {
      const char* weights = panel(stage.down, job, index) + from * pair_bytes();
      const char* after = next;
      if (index + 1 < end) {
        after = panel(stage.down, job, index + 1) + from * pair_bytes();
      } else if (from + step < pairs) {
        after = panel(stage.down, job, begin) + (from + step) * pair_bytes();
      }
      const Ahead whole = ahead(after, weights);
      for (int64_t i = 0; i < count; ++i) {
        const Block part = block(job, i);
        const char* x = input(scratch, stage, part) + 2 * from * part.rows * path_.activation_size;
        path_.accumulate[part.rows - 1](weights, step, x, sums_of(index, part), from == 0, whole.part(i, count, step));
      }
    }
  }
  for (int64_t index = begin; index < end; ++index) {
    for (int64_t i = 0; i < count; ++i) {
      const Block part = block(job, i);
      if (stage.down) {
        path_.finish_down(sums_of(index, part), part.rows, target(job, part, index));
      } else {
        path_.finish_gate_up(sums_of(index, part), part.rows, output(stage, part, index),
                             layout_.inter - index * kColumns);
      }
    }
  }
}

}  // namespace ffn::cpu
