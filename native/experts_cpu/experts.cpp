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
constexpr int64_t kWidenFrom = 3;  // blocks of rows that make a widened copy of a panel worth its cost

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
      x_row_bytes_(ceil_div(layout.hidden, kChunk) * kChunk * path_.activation_size),
      activation_row_bytes_(layout.gate_up_panels * kChunk * path_.activation_size),
      panels_of_down_task_(std::max<int64_t>(1, kTaskBytes / layout.down_panel_bytes)),
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
  const int64_t down_tasks = ceil_div(layout_.down_panels, panels_of_down_task_);
  int64_t tasks = 0;
  const auto add = [&](bool is_down, int64_t job) {
    if (job < 0 || job >= jobs) return;
    stages_.push_back({is_down, job, tasks, is_down ? down_tasks : layout_.gate_up_panels});
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
    if (path_.widen != nullptr && scratch.wide == nullptr) {
      const int64_t pairs = std::max(layout_.hidden_pairs, layout_.inter_pairs);
      scratch.wide = std::make_unique<Memory>(pairs * 4 * kColumns * sizeof(float));
    }
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

const char* Experts::first_panel(const Stage& stage, int64_t task) const {
  const char* weights = jobs_[stage.job].weights;
  if (!stage.down) return weights + task * layout_.gate_up_panel_bytes;
  return weights + layout_.gate_up_panels * layout_.gate_up_panel_bytes +
         task * panels_of_down_task_ * layout_.down_panel_bytes;
}

// Takes one task ahead, so that its first panel can be fetched while the one before is computed.
void Experts::work(int worker) {
  const int64_t tasks = stages_.back().first_task + stages_.back().tasks;
  size_t current_stage = 0, next_stage = 0;
  const auto claim = [&] {
    const int64_t task = cursor_.fetch_add(1, std::memory_order_relaxed);
    while (task < tasks && task >= stages_[next_stage].first_task + stages_[next_stage].tasks) ++next_stage;
    return task;
  };
  for (int64_t task = claim(); task < tasks;) {
    current_stage = next_stage;
    const int64_t upcoming = claim();
    const char* next =
        upcoming < tasks ? first_panel(stages_[next_stage], upcoming - stages_[next_stage].first_task) : nullptr;
    const Stage& stage = stages_[current_stage];
    run_task(scratch_[worker], stage, task - stage.first_task, next);
    task = upcoming;
  }
}

void Experts::run_task(Scratch& scratch, const Stage& stage, int64_t task, const char* next) {
  const int64_t number = stage.job;
  const Job& job = jobs_[number];
  const int64_t down_tasks = ceil_div(layout_.down_panels, panels_of_down_task_);
  const char* weights = first_panel(stage, task);
  if (!stage.down) {
    if (number >= kRing) wait_for(done_[2 * (number - kRing) + 1], down_tasks);
    gate_up(scratch, job, number, {weights, next ? next : weights, task});
    done_[2 * number].fetch_add(1, std::memory_order_release);
    return;
  }
  wait_for(done_[2 * number], layout_.gate_up_panels);
  if (number > 0) wait_for(done_[2 * (number - 1) + 1], down_tasks);
  const int64_t end = std::min(layout_.down_panels, (task + 1) * panels_of_down_task_);
  for (int64_t index = task * panels_of_down_task_; index < end; ++index, weights += layout_.down_panel_bytes) {
    const char* after = index + 1 < end ? weights + layout_.down_panel_bytes : next;
    down(scratch, job, number, {weights, after ? after : weights, index});
  }
  done_[2 * number + 1].fetch_add(1, std::memory_order_release);
}

void Experts::gate_up(Scratch& scratch, const Job& job, int64_t number, const Panel& panel) {
  const int64_t count = blocks(job);
  char* x = scratch.x->data();
  if (scratch.gathered != number) {
    for (int64_t i = 0; i < count; ++i) {
      const Block part = block(job, i);
      path_.gather(item_->hidden, layout_.hidden, rows_.data() + job.begin + part.begin, part.rows,
                   x + part.begin * x_row_bytes_);
    }
    scratch.gathered = number;
  }
  const Path* path = &path_;
  const void* weights = panel.weights;
  if (count >= kWidenFrom && path_.widen != nullptr) {
    path = path_.wide;
    weights = scratch.wide->data();
    path_.widen(panel.weights, layout_.hidden_pairs, reinterpret_cast<float*>(scratch.wide->data()));
  }
  const int64_t valid = layout_.inter - panel.index * kColumns;
  for (int64_t i = 0; i < count; ++i) {
    const Block part = block(job, i);
    char* out = activations(number) + part.begin * activation_row_bytes_ +
                panel.index * part.rows * kChunk * path_.activation_size;
    path->gate_up[part.rows - 1](weights, layout_.hidden_pairs, x + part.begin * x_row_bytes_, out, valid,
                                 i + 1 == count ? panel.next : weights);
  }
}

void Experts::down(Scratch& scratch, const Job& job, int64_t number, const Panel& panel) {
  const int64_t count = blocks(job);
  const Path* path = &path_;
  const void* weights = panel.weights;
  if (count >= kWidenFrom && path_.widen != nullptr) {
    path = path_.wide;
    weights = scratch.wide->data();
    path_.widen(panel.weights, layout_.inter_pairs, reinterpret_cast<float*>(scratch.wide->data()));
  }
  const int64_t column = panel.index * 2 * kColumns;
  Target target{item_->partial + column,
                layout_.hidden,
                std::min(2 * kColumns, layout_.hidden - column),
                nullptr,
                nullptr,
                nullptr};
  for (int64_t i = 0; i < count; ++i) {
    const Block part = block(job, i);
    const int64_t slot = job.begin + part.begin;
    target.rows = rows_.data() + slot;
    target.scale = scales_.data() + slot;
    target.first = first_.data() + slot;
    path->down[part.rows - 1](weights, layout_.inter_pairs, activations(number) + part.begin * activation_row_bytes_,
                              target, i + 1 == count ? panel.next : weights);
  }
}

}  // namespace ffn::cpu
