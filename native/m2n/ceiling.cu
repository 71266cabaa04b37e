// The fastest plain read of memory, to compare with.
#include "m2n/api.h"
#include "m2n/host.hpp"
#include "m2n/ptx.cuh"

namespace ffn {
namespace {

__global__ void __launch_bounds__(512) read_all(const uint4* data, uint64_t pieces, uint32_t* sink) {
  uint32_t sum = 0;
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + 7 * stride < pieces; i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = __ldcs(data + i + k * stride);
#pragma unroll
    for (int k = 0; k < 8; ++k) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  for (; i < pieces; i += stride) sum += data[i].x;
  if (sum == 0x9E3779B9u) *sink = sum;
}

}  // namespace
}  // namespace ffn

int ffn_m2n_read_all(const void* device_memory, uint64_t nbytes, void* device_sink, void* stream) {
  return ffn::guarded([&] {
    ffn::read_all<<<ffn::multiprocessors() * 4, 512, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const uint4*>(device_memory), nbytes / 16, static_cast<uint32_t*>(device_sink));
    ffn::check(cudaGetLastError(), "read_all");
  });
}
