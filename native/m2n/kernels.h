// Launchers of the window kernels: one .cu for each verb.
#pragma once

#include <cuda_runtime.h>

#include "m2n/attention_state.cuh"
#include "m2n/service_state.cuh"

namespace ffn {

// `overlap`: programmatic dependent launch; the kernel waits itself before it reads what its predecessor wrote.
template <typename... P, typename... A>
cudaError_t launch(void (*kernel)(P...), int blocks, int threads, int shared, cudaStream_t stream, bool overlap,
                   A&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, P(arguments)...);
}

// F: the next post, or an empty item after shape.wait_us or once *stop is not 0; its rows sorted by expert.
cudaError_t launch_wait_and_sort(cudaStream_t stream, ServiceState* state, const ServiceShape& shape,
                                 const Workspace& work, const uint32_t* stop, ServiceCounters* report);
// F: weighted sums into the A rank's window, then its flag; the lane expects the next post.
cudaError_t launch_combine(cudaStream_t stream, bool overlap, int multiprocessors, ServiceState* state,
                           const ServiceShape& shape, const Workspace& work, ServiceCounters* report);

// A: rows, local ids and weights to every F rank that owns one of their experts, then its flag.
cudaError_t launch_dispatch(cudaStream_t stream, int blocks, AttentionStage* stage, const DispatchCall& call);
// A: until every F rank answered the last post of `stage`, or *control (enum Control) ends the wait, or the deadline
// passes. Goes over to a session that the host offers meanwhile. `early`: the sum behind it takes its place meanwhile.
cudaError_t launch_wait_replies(cudaStream_t stream, AttentionStage* stage, const uint32_t* control, WaitReport* report,
                                bool early);
// A: out[t] = sum over F ranks of their partial rows; NaN when the wait failed.
cudaError_t launch_sum(cudaStream_t stream, int blocks, AttentionStage* stage, const SumCall& call);

}  // namespace ffn
