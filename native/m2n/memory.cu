// Devices, raw memory and its handles between processes.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "m2n/api.h"
#include "m2n/host.hpp"

namespace ffn {

std::string& last_error() {
  thread_local std::string text;
  return text;
}

}  // namespace ffn

using ffn::check;
using ffn::guarded;

const char* ffn_m2n_error(void) { return ffn::last_error().c_str(); }
int ffn_m2n_version(void) { return FFN_M2N_VERSION; }

int ffn_m2n_device_count(int32_t* count) {
  return guarded([&] { check(cudaGetDeviceCount(count), "cudaGetDeviceCount"); });
}

int ffn_m2n_describe_device(int32_t device, ffn_m2n_device* description) {
  return guarded([&] {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    std::memset(description, 0, sizeof *description);
    std::snprintf(description->name, sizeof description->name, "%.63s", properties.name);
    std::memcpy(description->uuid, properties.uuid.bytes, 16);
    description->major = properties.major;
    description->minor = properties.minor;
    description->multiprocessors = properties.multiProcessorCount;
    description->total_bytes = properties.totalGlobalMem;
  });
}

int ffn_m2n_use_device(int32_t device) {
  return guarded([&] {
    // A kernel loaded at its first launch could wait for the kernel that polls, which waits for it.
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    check(cudaSetDevice(device), "cudaSetDevice");
  });
}

int ffn_m2n_enable_peer(int32_t device, int32_t peer) {
  return guarded([&] {
    int possible = 0;
    check(cudaDeviceCanAccessPeer(&possible, device, peer), "cudaDeviceCanAccessPeer");
    if (!possible) throw std::runtime_error("the two GPUs cannot reach each other's memory");
    check(cudaSetDevice(device), "cudaSetDevice");
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else {
      check(error, "cudaDeviceEnablePeerAccess");
    }
  });
}

int ffn_m2n_allocate(uint64_t nbytes, void** device_memory) {
  return guarded([&] {
    check(cudaMalloc(device_memory, nbytes), "cudaMalloc");
    ffn::zero(*device_memory, nbytes);
  });
}

int ffn_m2n_free(void* device_memory) {
  return guarded([&] { check(cudaFree(device_memory), "cudaFree"); });
}

int ffn_m2n_export(void* device_memory, uint8_t handle[64]) {
  return guarded([&] {
    cudaIpcMemHandle_t made;
    static_assert(sizeof made == 64, "the size of a handle is part of the protocol");
    check(cudaIpcGetMemHandle(&made, device_memory), "cudaIpcGetMemHandle");
    std::memcpy(handle, &made, sizeof made);
  });
}

int ffn_m2n_open(const uint8_t handle[64], void** device_memory) {
  return guarded([&] {
    cudaIpcMemHandle_t given;
    std::memcpy(&given, handle, sizeof given);
    check(cudaIpcOpenMemHandle(device_memory, given, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  });
}

int ffn_m2n_close(void* device_memory) {
  return guarded([&] { check(cudaIpcCloseMemHandle(device_memory), "cudaIpcCloseMemHandle"); });
}

int ffn_m2n_copy(void* target, const void* source, uint64_t nbytes) {
  return guarded([&] {
    check(cudaMemcpy(target, source, nbytes, cudaMemcpyDefault), "cudaMemcpy");
    check(cudaStreamSynchronize(nullptr), "cudaMemcpy");  // it may return before the last bytes are there
  });
}
