#include "process/last_words.hpp"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace ffn {
namespace {

constexpr int kFatal[] = {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV};
constexpr size_t kRecordSize = 2048;

void write_all(int fd, const char* text, size_t size) {
  while (size > 0) {
    const ssize_t written = write(fd, text, size);
    if (written <= 0) return;
    text += written;
    size -= written;
  }
}

void write_file(const char* path, const char* text, size_t size) {
  const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return;
  write_all(fd, text, size);
  close(fd);
}

// Never destroyed: its thread may outlive every static.
struct Watchdog {
  std::mutex mutex;
  std::condition_variable changed;
  bool running = false;
  bool armed = false;
  std::chrono::steady_clock::time_point deadline;
  int exit_code = 0;
  std::string message;
  Files files;

  void watch() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      if (!armed) {
        changed.wait(lock);
      } else if (changed.wait_until(lock, deadline) == std::cv_status::timeout && armed &&
                 std::chrono::steady_clock::now() >= deadline) {
        write_all(STDERR_FILENO, message.data(), message.size());
        for (const auto& [path, content] : files) write_file(path.c_str(), content.data(), content.size());
        _exit(exit_code);
      }
    }
  }
};

Watchdog& watchdog() {
  static auto* instance = new Watchdog;
  return *instance;
}

// Plain memory: a signal handler may touch nothing else.
struct CrashRecord {
  char path[4096];
  char text[kRecordSize];
  size_t size = 0;
  char* number = nullptr;
  struct sigaction previous[NSIG];
} crash;

void on_fatal(int signal_number, siginfo_t*, void*) {
  if (crash.number != nullptr) {
    crash.number[0] = static_cast<char>('0' + signal_number / 10);
    crash.number[1] = static_cast<char>('0' + signal_number % 10);
  }
  write_file(crash.path, crash.text, crash.size);
  sigaction(signal_number, &crash.previous[signal_number], nullptr);
  raise(signal_number);
}

}  // namespace

void arm_watchdog(double seconds, int exit_code, const std::string& message, const Files& files) {
  Watchdog& dog = watchdog();
  std::lock_guard<std::mutex> lock(dog.mutex);
  dog.deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
  dog.exit_code = exit_code;
  dog.message = message;
  dog.files = files;
  dog.armed = true;
  if (!dog.running) {
    std::thread([&dog] { dog.watch(); }).detach();
    dog.running = true;
  }
  dog.changed.notify_all();
}

void disarm_watchdog() {
  Watchdog& dog = watchdog();
  std::lock_guard<std::mutex> lock(dog.mutex);
  dog.armed = false;
  dog.changed.notify_all();
}

void bound_signals(int from_fd, int to_fd, double seconds, int exit_code, const std::string& message,
                   const Files& files) {
  std::thread([=] {
    bool first = true;
    char number;
    for (;;) {
      const ssize_t got = read(from_fd, &number, 1);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return;
      if (first) arm_watchdog(seconds, exit_code, message, files);
      first = false;
      write_all(to_fd, &number, 1);
    }
  }).detach();
}

void record_crashes(const std::string& record_path, const std::string& record) {
  if (record_path.size() >= sizeof(crash.path) || record.size() >= sizeof(crash.text)) {
    throw std::invalid_argument("the crash record or its path is too long");
  }
  std::memcpy(crash.path, record_path.c_str(), record_path.size() + 1);
  std::memcpy(crash.text, record.data(), record.size());
  crash.size = record.size();
  const size_t place = record.find("@@");
  crash.number = place == std::string::npos ? nullptr : crash.text + place;
  struct sigaction action{};
  action.sa_sigaction = &on_fatal;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  for (const int number : kFatal) {
    struct sigaction before{};
    sigaction(number, &action, &before);
    if (before.sa_sigaction != &on_fatal) crash.previous[number] = before;
  }
}

}  // namespace ffn
