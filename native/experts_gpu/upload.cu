// Weights on their way to where they stay: from pinned buffers, or made on the device from a pool of random values.
#include "m2n/api.h"
#include "m2n/host.hpp"

namespace ffn {
namespace {

// Row i of the source becomes row place[i] of the target; a block moves one row.
__global__ void __launch_bounds__(128)
    scatter_rows(uint4* target, const uint4* source, const int32_t* place, int pieces) {
  const uint4* from = source + int64_t{blockIdx.x} * pieces;
  uint4* to = target + int64_t{place[blockIdx.x]} * pieces;
  for (int i = threadIdx.x; i < pieces; i += blockDim.x) to[i] = from[i];
}

// The same with rows that lie one after the other in a pool that repeats, from `start` on.
__global__ void __launch_bounds__(128) fill_rows(uint16_t* target, const int32_t* place, const uint16_t* pool,
                                                 uint64_t pool_size, uint64_t start, int width) {
  uint16_t* to = target + int64_t{place[blockIdx.x]} * width;
  const uint64_t begin = (start + uint64_t{blockIdx.x} * width) % pool_size;
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    const uint64_t at = begin + i;
    to[i] = pool[at < pool_size ? at : at % pool_size];
  }
}

// Two pinned buffers of one thread that reads: the next one is filled while the last one is copied.
class Uploader {
 public:
  explicit Uploader(size_t bytes) : bytes_(bytes) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    for (Slot& slot : slots_) {
      check(cudaHostAlloc(&slot.host, bytes, cudaHostAllocDefault), "cudaHostAlloc");
      check(cudaMalloc(&slot.device, bytes), "cudaMalloc");
      check(cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming | cudaEventBlockingSync), "cudaEventCreate");
    }
  }
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;
  ~Uploader() {
    (void)cudaStreamSynchronize(stream_);
    for (Slot& slot : slots_) {
      (void)cudaEventDestroy(slot.done);
      (void)cudaFree(slot.device);
      (void)cudaFreeHost(slot.host);
    }
    (void)cudaStreamDestroy(stream_);
  }

  void* buffer() {
    Slot& slot = slots_[turn_ % 2];
    if (turn_ >= 2) check(cudaEventSynchronize(slot.done), "an upload");
    return slot.host;
  }

  void put(void* target, const int32_t* place, int rows, int row_bytes) {
    if (static_cast<size_t>(rows) * row_bytes > bytes_) throw std::invalid_argument("more than the buffer holds");
    Slot& slot = slots_[turn_ % 2];
    check(cudaMemcpyAsync(slot.device, slot.host, size_t(rows) * row_bytes, cudaMemcpyHostToDevice, stream_), "copy");
    scatter_rows<<<rows, 128, 0, stream_>>>(static_cast<uint4*>(target), static_cast<const uint4*>(slot.device), place,
                                            row_bytes / 16);
    check(cudaGetLastError(), "scatter_rows");
    check(cudaEventRecord(slot.done, stream_), "cudaEventRecord");
    ++turn_;
  }

  void finish() { check(cudaStreamSynchronize(stream_), "an upload"); }

 private:
  struct Slot {
    void* host = nullptr;
    void* device = nullptr;
    cudaEvent_t done = nullptr;
  };
  size_t bytes_;
  uint64_t turn_ = 0;
  Slot slots_[2];
  cudaStream_t stream_ = nullptr;
};

Uploader& as_uploader(void* p) { return *static_cast<Uploader*>(p); }

}  // namespace
}  // namespace ffn

using ffn::as_uploader;
using ffn::check;
using ffn::guarded;

int ffn_m2n_fill_rows(void* device_target, const int32_t* device_place, const void* device_pool, uint64_t pool_size,
                      uint64_t start, int32_t rows, int32_t width) {
  return guarded([&] {
    ffn::fill_rows<<<rows, 128>>>(static_cast<uint16_t*>(device_target), device_place,
                                  static_cast<const uint16_t*>(device_pool), pool_size, start, width);
    check(cudaGetLastError(), "fill_rows");
  });
}
int ffn_m2n_uploader_create(uint64_t nbytes, void** uploader) {
  return guarded([&] { *uploader = new ffn::Uploader(nbytes); });
}
int ffn_m2n_uploader_destroy(void* uploader) {
  return guarded([&] { delete static_cast<ffn::Uploader*>(uploader); });
}
int ffn_m2n_uploader_buffer(void* uploader, void** host) {
  return guarded([&] { *host = as_uploader(uploader).buffer(); });
}
int ffn_m2n_uploader_put(void* uploader, void* device_target, const int32_t* device_place, int32_t rows,
                         int32_t row_bytes) {
  return guarded([&] { as_uploader(uploader).put(device_target, device_place, rows, row_bytes); });
}
int ffn_m2n_uploader_finish(void* uploader) {
  return guarded([&] { as_uploader(uploader).finish(); });
}
int ffn_m2n_synchronize(void) {
  return guarded([&] { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); });
}
