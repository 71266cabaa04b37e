#include "cam_twin/region.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <stdexcept>

#include "cam_twin/settings.hpp"

namespace cam_twin {

namespace {

constexpr uint64_t kMagic = 0x32765f6d61637466;  // also tells a file of another layout

struct Header {
  uint64_t magic;
  Topology topology;
  int64_t row_type;
};

size_t page(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

struct Layout {
  size_t ranks, posts, answers, ids, rows, scales, combined, total;
  size_t ids_each, rows_each, scales_each, combined_each;

  explicit Layout(const Topology& t) {
    const auto attn = static_cast<size_t>(t.attn_ranks);
    const auto batch = static_cast<size_t>(t.most_batch());
    const auto hidden = static_cast<size_t>(t.hidden);
    const auto top_k = static_cast<size_t>(t.top_k);
    ids_each = page(batch * top_k * sizeof(int32_t));
    rows_each = page(batch * hidden * 2);
    scales_each = page(batch * sizeof(float));
    combined_each = page(batch * top_k * hidden * 2);
    ranks = page(sizeof(Header));
    posts = ranks + page((attn + t.moe_ranks) * sizeof(Rank));
    answers = posts + page(attn * sizeof(Post));
    ids = answers + page(attn * t.moe_ranks * sizeof(Answer));
    rows = ids + attn * ids_each;
    scales = rows + attn * rows_each;
    combined = scales + attn * scales_each;
    total = combined + attn * combined_each;
  }
};

[[noreturn]] void fail(const std::string& what, const std::string& path) {
  throw std::runtime_error("cpu-twin: cannot " + what + " " + path + ": " + std::strerror(errno));
}

struct File {
  explicit File(const std::string& path) : fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
    if (fd < 0) fail("open", path);
    if (flock(fd, LOCK_EX) != 0) {
      close(fd);
      fail("lock", path);
    }
  }
  ~File() {
    flock(fd, LOCK_UN);  // closing alone would not: the mapping keeps the open file
    close(fd);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd;
};

void require_equal(const char* name, int64_t mine, int64_t agreed) {
  if (mine != agreed) {
    throw std::runtime_error(std::string("cpu-twin: this rank has ") + name + " " + std::to_string(mine) +
                             ", the group was made with " + std::to_string(agreed) + "; all ranks must agree");
  }
}

void require_agreement(const Topology& agreed, int64_t agreed_row_type, const Topology& mine, RowType row_type) {
  if (!broken(kMixedMaxSeqLen)) require_equal("max_seq_len", mine.max_seq_len, agreed.max_seq_len);
  require_equal("hidden_size", mine.hidden, agreed.hidden);
  require_equal("top_k", mine.top_k, agreed.top_k);
  require_equal("moe_rank_num", mine.moe_ranks, agreed.moe_ranks);
  require_equal("attn_rank_num", mine.attn_ranks, agreed.attn_ranks);
  require_equal("route_expert_num_per_moe", mine.experts, agreed.experts);
  require_equal("tp_size", mine.tp, agreed.tp);
  require_equal("dynamic_quant", mine.quant, agreed.quant);
  require_equal("row type (0 float16, 1 bfloat16)", row_type, agreed_row_type);
}

// False for a zombie as well: it will not answer, whether or not somebody reaps it.
bool lives(int32_t pid) {
  char name[32];
  std::snprintf(name, sizeof(name), "/proc/%d/stat", pid);
  FILE* file = std::fopen(name, "r");
  if (file == nullptr) return false;
  char text[256] = {};
  const size_t read = std::fread(text, 1, sizeof(text) - 1, file);
  std::fclose(file);
  const char* bracket = read > 0 ? std::strrchr(text, ')') : nullptr;
  return bracket != nullptr && bracket[1] == ' ' && bracket[2] != 'Z' && bracket[2] != 'X';
}

}  // namespace

std::shared_ptr<Region> Region::join(const std::string& path, const Topology& topology, RowType row_type) {
  const File file(path);
  struct stat info{};
  if (fstat(file.fd, &info) != 0) fail("look at", path);
  Header header{kMagic, topology, row_type};
  if (info.st_size == 0) {
    const auto bytes = static_cast<off_t>(Layout(topology).total);
    if (ftruncate(file.fd, bytes) != 0) fail("size", path);
    if (pwrite(file.fd, &header, sizeof(header), 0) != static_cast<ssize_t>(sizeof(header))) fail("write", path);
  } else {
    if (pread(file.fd, &header, sizeof(header), 0) != static_cast<ssize_t>(sizeof(header))) fail("read", path);
    if (header.magic != kMagic) throw std::runtime_error("cpu-twin: " + path + " is not a group of this version");
    require_agreement(header.topology, header.row_type, topology, row_type);
  }
  const size_t bytes = Layout(header.topology).total;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0);
  if (memory == MAP_FAILED) fail("map", path);
  return std::shared_ptr<Region>(new Region(memory, bytes, header.topology, static_cast<RowType>(header.row_type)));
}

Region::Region(void* memory, size_t bytes, const Topology& topology, RowType row_type)
    : memory_(static_cast<char*>(memory)), bytes_(bytes), topology_(topology), row_type_(row_type) {}

void Region::require_same(const Topology& topology, RowType row_type) const {
  require_agreement(topology_, row_type_, topology, row_type);
}

Region::~Region() { munmap(memory_, bytes_); }

void Region::claim(int64_t rank_index) {
  Rank& line = rank(rank_index);
  int32_t owner = 0;
  if (line.pid.compare_exchange_strong(owner, getpid()) || owner == getpid() || broken(kSharedRank)) return;
  throw std::runtime_error("cpu-twin: rank " + std::to_string(rank_index) + " of this group is process " +
                           std::to_string(owner) + "; a rank cannot join a group again");
}

Rank& Region::rank(int64_t index) const { return reinterpret_cast<Rank*>(memory_ + Layout(topology_).ranks)[index]; }

Post& Region::post(int64_t attn) const { return reinterpret_cast<Post*>(memory_ + Layout(topology_).posts)[attn]; }

Answer& Region::answer(int64_t attn, int64_t moe) const {
  return reinterpret_cast<Answer*>(memory_ + Layout(topology_).answers)[attn * topology_.moe_ranks + moe];
}

int32_t* Region::ids(int64_t attn) const {
  const Layout layout(topology_);
  return reinterpret_cast<int32_t*>(memory_ + layout.ids + attn * layout.ids_each);
}

char* Region::rows(int64_t attn) const {
  const Layout layout(topology_);
  return memory_ + layout.rows + attn * layout.rows_each;
}

float* Region::scales(int64_t attn) const {
  const Layout layout(topology_);
  return reinterpret_cast<float*>(memory_ + layout.scales + attn * layout.scales_each);
}

char* Region::combined(int64_t attn) const {
  const Layout layout(topology_);
  return memory_ + layout.combined + attn * layout.combined_each;
}

void Region::wake(int64_t index) const {
  Word& event = rank(index).event;
  event.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&event), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Region::wait(int64_t index, uint32_t seen, int64_t timeout_ns) const {
  timespec timeout{0, timeout_ns};  // below a second
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&rank(index).event), FUTEX_WAIT, seen, &timeout, nullptr, 0);
  if (settings().notice_peer_death) require_peers(index);
}

void Region::require_peers(int64_t waiting_rank) const {
  for (int64_t index = 0; index < topology_.attn_ranks + topology_.moe_ranks; ++index) {
    const int32_t pid = rank(index).pid.load(std::memory_order_relaxed);
    if (pid != 0 && !lives(pid)) {
      throw std::runtime_error("cpu-twin: rank " + std::to_string(index) + " (process " + std::to_string(pid) +
                               ") is gone while rank " + std::to_string(waiting_rank) + " waits for it");
    }
  }
}

}  // namespace cam_twin
