// What a process still says and does when the interpreter no longer can: bounded ends and crash records.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace ffn {

// (path, content) of each.
using Files = std::vector<std::pair<std::string, std::string>>;

// Ends the process with `exit_code` in `seconds`, unless disarmed before: writes `message` to stderr and `files`. A
// thread of its own that needs no interpreter lock. Arming again replaces the deadline.
void arm_watchdog(double seconds, int exit_code, const std::string& message, const Files& files);
void disarm_watchdog();

// Reads signal numbers from `from_fd` (the interpreter's wakeup descriptor) for ever, in a thread that needs no
// interpreter lock: the first one arms the watchdog as above, all are passed on to `to_fd`. So a signal bounds the end
// even while a native call holds the lock.
void bound_signals(int from_fd, int to_fd, double seconds, int exit_code, const std::string& message,
                   const Files& files);

// From now on a fatal signal writes `record` (with the signal's number in place of "@@") to `record_path` before it
// does what it did before.
void record_crashes(const std::string& record_path, const std::string& record);

}  // namespace ffn
