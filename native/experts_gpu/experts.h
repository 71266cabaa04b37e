// The experts of one item: gate_up product, SwiGLU and down product in one persistent kernel.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "m2n/service_state.cuh"

namespace ffn {

// How the weights of all layers lie in memory, as the copy engine wants it.
struct ExpertWeights {
  CUtensorMap w13;  // [experts, 2 I, H], rows in the order of ffn_faas/experts/gpu_layout.py
  CUtensorMap w2;   // [experts, H, I], likewise
};

// H a multiple of 128, I of 64. Needs no libcuda at link time. Returns cudaErrorInvalidValue for shapes it cannot take.
cudaError_t describe_weights(const ServiceShape& shape, const void* w13, const void* w2, int64_t experts,
                             ExpertWeights* weights);

// target[e, i] = source[e, order[i]] for rows of row_bytes (a multiple of 16); target is not source.
cudaError_t launch_permute_rows(cudaStream_t stream, void* target, const void* source, const int32_t* order,
                                int experts, int rows, int row_bytes);

// Raises the shared memory limit of the kernel; once for each device.
cudaError_t prepare_experts();

// work.expert_out[place] = expert(hidden[row]) for each place of the sorted order, unweighted, bf16.
cudaError_t launch_experts(cudaStream_t stream, bool overlap, int blocks, const ExpertWeights& weights,
                           const ServiceState* state, const ServiceShape& shape, const Workspace& work);

}  // namespace ffn
