// What the operators' binding checks, for CPU and Meta alike: dtypes, shapes, contiguity, ranks, limits.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <string>

#include "cam_twin/planner.hpp"
#include "cam_twin/region.hpp"

namespace cam_twin {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The operator's name stands before the reason. Nothing happens where the test switched the checks off.
struct Check {
  const char* operation;
  void that(bool holds, const std::string& reason) const;
  void shape(const Tensor& tensor, const char* name, ScalarType type, std::initializer_list<int64_t> sizes) const;
  void row_type(const Tensor& tensor, const char* name) const;  // float16 or bfloat16, contiguous
  void anchor(const Tensor& tensor) const;
  void one_device(std::initializer_list<const Tensor*> tensors) const;
  void topology(const Topology& topology, int64_t world) const;  // max_seq_len and tp only where > 0
  void attention_rank(const Topology& topology, int64_t rank) const;
  void moe_rank(const Topology& topology, int64_t rank) const;
  void communication(const Tensor& comm_args, const std::string& group) const;
  void windows(const Topology& topology) const;  // against LCCL_BUFFER_SIZE, as the device's tiling does
};

RowType row_type_of(const Tensor& tensor);

}  // namespace cam_twin
