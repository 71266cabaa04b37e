// Errors and owners shared by the host side: the C border turns exceptions into text.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace ffn {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

std::string& last_error();

template <typename F>
int guarded(F&& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    last_error() = error.what();
    return 1;
  }
}

// Zeroed when it returns: a set in the default stream would not be ordered before what other streams write there, and
// on a GPU that others use it comes late. In a stream of its own, since a kernel that waits may be in flight.
inline void zero(void* device, size_t bytes) {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  cudaError_t error = cudaMemsetAsync(device, 0, bytes, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  (void)cudaStreamDestroy(stream);
  check(error, "cudaMemset");
}

// Device memory from cudaMalloc, zeroed.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : bytes_(count * sizeof(T)) {
    if (bytes_ == 0) return;
    check(cudaMalloc(&data_, bytes_), "cudaMalloc");
    zero(data_, bytes_);
  }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { (void)cudaFree(data_); }
  T* get() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  T* data_ = nullptr;
  size_t bytes_ = 0;
};

// Host memory that kernels read and write while the host does, zeroed.
template <typename T>
class PinnedArray {
 public:
  explicit PinnedArray(size_t count) : size_(count) {
    check(cudaHostAlloc(&host_, count * sizeof(T), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    for (size_t i = 0; i < count; ++i) host_[i] = T{};
    check(cudaHostGetDevicePointer(&device_, host_, 0), "cudaHostGetDevicePointer");
  }
  PinnedArray(const PinnedArray&) = delete;
  PinnedArray& operator=(const PinnedArray&) = delete;
  ~PinnedArray() { (void)cudaFreeHost(host_); }
  T* host() const { return host_; }
  T* device() const { return device_; }
  size_t size() const { return size_; }

 private:
  size_t size_;
  T* host_ = nullptr;
  T* device_ = nullptr;
};

template <typename T>
class PinnedValue : public PinnedArray<T> {
 public:
  PinnedValue() : PinnedArray<T>(1) {}
};

inline int multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

}  // namespace ffn
