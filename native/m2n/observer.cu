// Host side of whoever looks at a device while kernels wait on it: copies, and its clock beside the host's.
#include <time.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "m2n/api.h"
#include "m2n/host.hpp"
#include "m2n/ptx.cuh"

namespace ffn {
namespace {

constexpr uint32_t kRounds = 32;
constexpr uint32_t kOver = ~0u;
constexpr int64_t kPatienceNs = 100'000'000;

// Pinned. The host asks for reading `asked`, the device says which one stands in `device_ns`.
struct Exchange {
  volatile uint32_t asked;
  volatile uint32_t answered;
  volatile uint64_t device_ns;
};

// One thread: a reading each time the host asks, so that no launch lies between its two looks at its own clock.
__global__ void read_clock(Exchange* exchange) {
  for (uint32_t round = 1; round <= kRounds; ++round) {
    uint32_t asked;
    do {
      asked = exchange->asked;
    } while (asked < round);
    if (asked == kOver) return;
    exchange->device_ns = nanoseconds();
    fence_sys();
    exchange->answered = round;
  }
}

int64_t host_ns() {
  timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// While it lives, calls of this thread are allowed although another thread captures a graph in global mode: none of
// them touches a stream that is captured.
class BesideCaptures {
 public:
  BesideCaptures() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode"); }
  ~BesideCaptures() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class Observer {
 public:
  Observer() : staging_(std::max(sizeof(ffn_m2n_items), sizeof(ffn_m2n_posts))) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    // Its kernel is loaded now: later that could wait for a kernel that polls.
    exchange_.host()->asked = kOver;
    read_clock<<<1, 1, 0, stream_>>>(exchange_.device());
    check(cudaGetLastError(), "read_clock");
    check(cudaStreamSynchronize(stream_), "read_clock");
  }
  ~Observer() { (void)cudaStreamDestroy(stream_); }

  void copy(void* host, const void* device_memory, uint64_t nbytes) {
    if (nbytes > staging_.size()) throw std::invalid_argument("no ring is so large");
    const BesideCaptures beside;
    finish();
    check(cudaMemcpyAsync(staging_.host(), device_memory, nbytes, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
    finish();
    std::memcpy(host, staging_.host(), nbytes);
  }

  // The reading with the least time between the host's two looks: the device read its clock in between.
  void clock(uint64_t* device, int64_t* host, int64_t* error) {
    const BesideCaptures beside;
    finish();
    Exchange& exchange = *exchange_.host();
    exchange.asked = exchange.answered = 0;
    read_clock<<<1, 1, 0, stream_>>>(exchange_.device());
    check(cudaGetLastError(), "read_clock");
    const int64_t limit = host_ns() + kPatienceNs;
    int64_t least = std::numeric_limits<int64_t>::max();
    for (uint32_t round = 1; round <= kRounds; ++round) {
      const int64_t before = host_ns();
      exchange.asked = round;
      int64_t after;
      do {
        after = host_ns();
      } while (exchange.answered != round && after < limit);
      if (after >= limit) break;
      if (after - before < least) {
        least = after - before;
        *device = exchange.device_ns;
        *host = before + least / 2;
      }
    }
    exchange.asked = kOver;
    finish();
    if (least == std::numeric_limits<int64_t>::max()) throw std::runtime_error("the device's clock could not be read");
    *error = least / 2 + 1;
  }

 private:
  // Streams may share a queue of the device, and then this one stands behind a kernel that waits: the caller is needed
  // elsewhere before that has ended. What is left in flight is waited for by the next call.
  void finish() {
    const int64_t limit = host_ns() + kPatienceNs;
    for (;;) {
      const cudaError_t error = cudaStreamQuery(stream_);
      if (error == cudaSuccess) return;
      if (error != cudaErrorNotReady) check(error, "observing the device");
      (void)cudaGetLastError();
      if (host_ns() > limit) throw std::runtime_error("the device is too busy to be observed");
    }
  }

  PinnedArray<uint8_t> staging_;
  PinnedValue<Exchange> exchange_;
  cudaStream_t stream_ = nullptr;
};

Observer& as_observer(void* p) { return *static_cast<Observer*>(p); }

}  // namespace
}  // namespace ffn

using ffn::as_observer;
using ffn::guarded;

int ffn_m2n_observer_create(void** observer) {
  return guarded([&] { *observer = new ffn::Observer(); });
}
int ffn_m2n_observer_destroy(void* observer) {
  return guarded([&] { delete static_cast<ffn::Observer*>(observer); });
}
int ffn_m2n_observer_copy(void* observer, void* host, const void* device_memory, uint64_t nbytes) {
  return guarded([&] { as_observer(observer).copy(host, device_memory, nbytes); });
}
int ffn_m2n_observer_clock(void* observer, uint64_t* device_ns, int64_t* host_ns, int64_t* error_ns) {
  return guarded([&] { as_observer(observer).clock(device_ns, host_ns, error_ns); });
}
