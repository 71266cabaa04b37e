// The operators' kernels; kExecute: for CPU tensors, otherwise for Meta tensors (checks and shapes alone).
#pragma once

#include <torch/csrc/stable/library.h>

namespace cam_twin {

template <bool kExecute>
void add_exchange(torch::stable::detail::StableLibrary& library);
template <bool kExecute>
void add_layered(torch::stable::detail::StableLibrary& library);

}  // namespace cam_twin
