// What a twin was told when it was made; a process may make several: where groups meet, the adversary's seed, faults,
// and, for the test that looks for tests which would not notice, which honesty rule is switched off.
#pragma once

#include <cstdint>
#include <string>

namespace cam_twin {

// Bits of Settings::mutations. Each switches one honesty rule off. Order shared with ffn_faas/ascend/twin.py.
enum Mutation : uint64_t {
  kNoPoison = 1 << 0,            // the capacity tail holds zeros
  kInOrder = 1 << 1,             // DP groups are delivered round-robin
  kCancellableReceive = 1 << 2,  // a dispatch receive gives up
  kOverwriteWindow = 1 << 3,     // a second dispatch send before combine receive passes
  kAnyBatchInfo = 1 << 4,        // combine send takes an altered batch_info
  kInt8Combine = 1 << 5,         // combine send takes int8 rows
  kMixedMaxSeqLen = 1 << 6,      // ranks may differ in max_seq_len
  kNoChecks = 1 << 7,            // the binding's checks are skipped
  kPartialGroup = 1 << 8,        // a DP group is delivered before all its ranks have sent
  kReceiveBeforeSend = 1 << 9,   // a second dispatch receive before combine send passes
  kTakeAnyNamespace = 1 << 10,   // read by twin.py: load beside the real operators
  kAnyIds = 1 << 11,             // combine receive takes other expert ids than were dispatched
  kSharedRank = 1 << 12,         // one rank may be claimed by two processes
  kKeepInput = 1 << 13,          // the second grouped matmul leaves its int8 input as it was
};

struct Settings {
  std::string directory;
  uint64_t seed = 0;
  uint64_t mutations = 0;
  bool notice_peer_death = false;  // a waiting operator fails when a peer's process ended; off: it waits for ever
  int64_t stuck_rank = -1;         // this F rank's dispatch receive never returns
  int64_t slow_rank = -1;          // this rank sleeps before each operator
  int64_t slow_ms = 0;
  double swiglu_limit = 0;  // clamp inside the layered SwiGLU, as a later fix of it has; 0: none, as the schema has it
};

// Keeps `settings` for good, since a blocked operator may hold them; their number.
int64_t add(const Settings& settings);

// Takes the number that twin.py put behind a group's name off it, and makes those settings the calling thread's.
class Use {
 public:
  explicit Use(std::string* group_name);
  ~Use();
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
};

// Those in use in this thread, else the newest.
const Settings& settings();
inline bool broken(Mutation rule) { return (settings().mutations & rule) != 0; }

}  // namespace cam_twin
