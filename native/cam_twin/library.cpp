// The C border that ffn_faas/ascend/twin.py calls through ctypes. Loading this library registers nothing: the operators
// exist only after cam_twin_register, so that nobody gets a twin without having asked for one.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>

#include "cam_twin/group.hpp"
#include "cam_twin/ops.hpp"
#include "cam_twin/planner.hpp"
#include "cam_twin/settings.hpp"

namespace {

using torch::stable::detail::StableLibrary;

void tell(char* reason, size_t size, const std::exception& error) {
  std::strncpy(reason, error.what(), size - 1);
  reason[size - 1] = '\0';
}

template <bool kExecute>
void implement(const char* key) {
  static StableLibrary library(StableLibrary::Kind::IMPL, "afd_ascend", key, __FILE__, __LINE__);
  cam_twin::add_exchange<kExecute>(library);
  cam_twin::add_layered<kExecute>(library);
}

}  // namespace

#define BORDER extern "C" __attribute__((visibility("default")))

// schemas: one after another, each ended by a newline, without the namespace. Once per process. 0, or 1 with a reason.
BORDER int cam_twin_register(const char* schemas, char* reason, size_t reason_size) {
  try {
    static StableLibrary definitions(StableLibrary::Kind::FRAGMENT, "afd_ascend", nullptr, __FILE__, __LINE__);
    const std::string text = schemas;
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = text.find('\n', begin);
      definitions.def(text.substr(begin, end - begin).c_str());
      begin = end + 1;
    }
    implement<true>("CPU");
    implement<false>("Meta");
    return 0;
  } catch (const std::exception& error) {
    tell(reason, reason_size, error);
    return 1;
  }
}

// The number of these settings; it goes behind the names of groups that are to have them, after the byte 0x1f.
BORDER int64_t cam_twin_configure(const char* directory, uint64_t seed, uint64_t mutations, int32_t notice_peer_death,
                                  int64_t stuck_rank, int64_t slow_rank, int64_t slow_ms, double swiglu_limit) {
  cam_twin::Settings settings;
  settings.directory = directory;
  settings.seed = seed;
  settings.mutations = mutations;
  settings.notice_peer_death = notice_peer_death != 0;
  settings.stuck_rank = stuck_rank;
  settings.slow_rank = slow_rank;
  settings.slow_ms = slow_ms;
  settings.swiglu_limit = swiglu_limit;
  return cam_twin::add(settings);
}

// Unmaps every group of this process; no operator may be running.
BORDER void cam_twin_leave_all() { cam_twin::Group::leave_all(); }

// The pure functions, for tests. values: Topology's members in order.
BORDER void cam_twin_window_bytes(const int64_t* values, int64_t* attention, int64_t* moe) {
  cam_twin::Topology topology{};
  std::memcpy(&topology, values, sizeof(topology));
  *attention = cam_twin::attention_window_bytes(topology);
  *moe = cam_twin::moe_window_bytes(topology);
}

// Rows for a text of BATCH_SIZE_FACTOR; -1 where it is refused.
BORDER int64_t cam_twin_receive_capacity(const char* factor) {
  std::string warning;
  try {
    return cam_twin::receive_capacity(factor, &warning);
  } catch (const std::exception&) {
    return -1;
  }
}

// totals[experts]; lasts receives the last expert of each chunk. The number of chunks, or -1 where an expert is too
// big.
BORDER int64_t cam_twin_plan(const int64_t* totals, int64_t experts, int64_t capacity, int64_t* lasts) {
  const std::vector<int64_t> all(totals, totals + experts);
  int64_t chunks = 0;
  try {
    for (int64_t first = 0; first < experts;) {
      lasts[chunks] = cam_twin::plan_chunk(all, first, capacity).last;
      first = lasts[chunks++] + 1;
    }
  } catch (const std::exception&) {
    return -1;
  }
  return chunks;
}
