// The two layered grouped matmuls as torch ops: lists hold one tensor per layer, layer_index picks on the device.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cam_twin/checks.hpp"
#include "cam_twin/grouped_matmul.hpp"
#include "cam_twin/numbers.hpp"
#include "cam_twin/ops.hpp"
#include "cam_twin/settings.hpp"

namespace cam_twin {

namespace {

using Tensors = std::vector<Tensor>;

int64_t last_size(const Tensor& tensor) { return tensor.size(tensor.dim() - 1); }

bool same_shape(const Tensor& left, const Tensor& right) {
  return left.scalar_type() == right.scalar_type() && left.dim() == right.dim() &&
         std::equal(left.sizes().begin(), left.sizes().end(), right.sizes().begin());
}

// What both operators ask of their lists, group_list and layer_index.
struct Layers {
  const Check& check;
  const Tensors& weights;
  const Tensor& group_list;
  const Tensor& layer_index;

  void require(const Tensor& x, int64_t group_list_type) const {
    check.that(!weights.empty(), "all_weight is an empty list");
    check.one_device({&x, &weights[0], &group_list, &layer_index});
    for (const Tensor& weight : weights) {
      check.that(same_shape(weight, weights[0]) && weight.dim() == 3 && weight.is_contiguous(),
                 "all_weight must hold contiguous tensors [E, K, N] of one shape and type");
    }
    const ScalarType type = weights[0].scalar_type();
    check.that(type == ScalarType::Int || type == ScalarType::Char, "all_weight must be int32 (packed int4) or int8");
    check.that(
        x.dim() == 2 && x.scalar_type() == ScalarType::Char && x.is_contiguous() && x.size(1) == weights[0].size(1),
        "x must be contiguous int8 [rows, " + std::to_string(weights[0].size(1)) + "]");
    check.shape(group_list, "group_list", ScalarType::Long, {weights[0].size(0)});
    check.shape(layer_index, "layer_index", ScalarType::Long, {1});
    check.that(group_list_type == 0 || group_list_type == 1, "group_list_type must be 0 (sums) or 1 (counts)");
  }

  void require_list(const Tensors& list, const char* name, ScalarType type) const {
    check.that(list.size() == weights.size(), std::string("all_weight and ") + name + " must have the same length");
    const int64_t size = weights[0].size(0) * width();
    for (const Tensor& tensor : list) {
      check.one_device({&weights[0], &tensor});
      check.that(tensor.scalar_type() == type && tensor.numel() == size && last_size(tensor) == width() &&
                     tensor.is_contiguous(),
                 std::string(name) + " has another shape or type than its weights need");
    }
  }

  bool int4() const { return weights[0].scalar_type() == ScalarType::Int; }
  int64_t width() const { return weights[0].size(2) * (int4() ? 8 : 1); }

  // The layer's place in the lists. A slice of batch_info is refused: the device's tiling reads the storage's shape.
  size_t layer() const {
    int64_t bytes = 0;
    aoti_torch_get_storage_size(layer_index.get(), &bytes);
    check.that(bytes == static_cast<int64_t>(sizeof(int64_t)),
               "layer_index must have a storage of one element, not be a slice; clone it");
    const int64_t layer = *layer_index.const_data_ptr<int64_t>();
    if (layer < 0 || layer >= static_cast<int64_t>(weights.size())) {
      throw std::runtime_error(std::string(check.operation) + ": layer_index " + std::to_string(layer) +
                               " is outside the lists");
    }
    return layer;
  }

  std::vector<int64_t> counts(int64_t rows, int64_t group_list_type) const {
    const int64_t* given = group_list.const_data_ptr<int64_t>();
    std::vector<int64_t> counts(group_list.numel());
    int64_t total = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      counts[i] = given[i] - (group_list_type == 0 && i > 0 ? given[i - 1] : 0);
      total += counts[i];
      if (counts[i] < 0 || total > rows) {
        throw std::runtime_error(std::string(check.operation) + ": group_list does not describe " +
                                 std::to_string(rows) + " rows");
      }
    }
    return counts;
  }

  Weights of(size_t layer) const {
    const Tensor& weight = weights[layer];
    return {weight.const_data_ptr(), int4(), weight.size(0), weight.size(1), width()};
  }
};

// float32 of an expert's columns: int64 carries float32 bits in its low half; bfloat16 and float32 as they are.
std::vector<float> floats(const Tensor& tensor, int64_t expert, int64_t width) {
  std::vector<float> values(width);
  for (int64_t n = 0; n < width; ++n) {
    const int64_t at = expert * width + n;
    if (tensor.scalar_type() == ScalarType::Long) {
      const auto bits = static_cast<uint32_t>(tensor.const_data_ptr<int64_t>()[at]);
      std::memcpy(&values[n], &bits, sizeof(bits));
    } else if (tensor.scalar_type() == ScalarType::BFloat16) {
      values[n] = static_cast<float>(static_cast<const BFloat16*>(tensor.const_data_ptr())[at]);
    } else {
      values[n] = tensor.const_data_ptr<float>()[at];
    }
  }
  return values;
}

template <bool kExecute>
Tensors gmm_swiglu_quant(const Tensor& x, const Tensors& all_weight, const Tensors& all_weight_scale,
                         const Tensors& all_weight_assist_matrix, const Tensor& x_scale, const Tensor& group_list,
                         const Tensor& layer_index, int64_t dequant_mode, int64_t quant_mode, int64_t group_list_type,
                         const std::optional<std::vector<int64_t>>& /*tuning_config*/) {
  const Check check{"gmm_swiglu_quant_v2_layered"};
  const Layers layers{check, all_weight, group_list, layer_index};
  layers.require(x, group_list_type);
  layers.require_list(all_weight_scale, "all_weight_scale", layers.int4() ? ScalarType::Long : ScalarType::Float);
  check.that(layers.int4() || all_weight_assist_matrix.empty(), "int8 weights take no all_weight_assist_matrix");
  if (layers.int4()) layers.require_list(all_weight_assist_matrix, "all_weight_assist_matrix", ScalarType::Float);
  check.that(dequant_mode == 0 && quant_mode == 0, "this twin has per-channel scales and per-token quantization alone");
  const int64_t rows = x.size(0);
  check.one_device({&x, &x_scale});
  check.shape(x_scale, "x_scale", ScalarType::Float, {rows});

  const int64_t inter = layers.width() / 2;
  const int64_t y_size[] = {rows, inter};
  const int64_t scale_size[] = {rows};
  Tensors out{torch::stable::new_empty(x_scale, {y_size, 2}, ScalarType::Char),
              torch::stable::new_empty(x_scale, {scale_size, 1}, ScalarType::Float)};
  if constexpr (kExecute) {
    const size_t layer = layers.layer();
    const std::vector<int64_t> counts = layers.counts(rows, group_list_type);
    const Weights weights = layers.of(layer);
    const auto* from = x.const_data_ptr<int8_t>();
    const auto* from_scale = x_scale.const_data_ptr<float>();
    auto* q = out[0].mutable_data_ptr<int8_t>();
    auto* scale = out[1].mutable_data_ptr<float>();
    std::vector<float> values(weights.width);
    int64_t row = 0;
    for (int64_t expert = 0; expert < weights.experts; ++expert) {
      if (counts[expert] == 0) continue;
      const std::vector<int8_t> matrix = unpacked(weights, expert);
      Columns columns{floats(all_weight_scale[layer], expert, weights.width), {}, {}};
      if (weights.int4) columns.bias = floats(all_weight_assist_matrix[layer], expert, weights.width);
      for (int64_t i = 0; i < counts[expert]; ++i, ++row) {
        multiply_row(from + row * weights.depth, from_scale[row], matrix.data(), weights.depth, weights.int4, columns,
                     values.data());
        swiglu_quantize(values.data(), inter, static_cast<float>(settings().swiglu_limit), q + row * inter,
                        scale + row);
      }
    }
    std::memset(q + row * inter, broken(kNoPoison) ? 0 : 127, (rows - row) * inter);
    std::memset(scale + row, broken(kNoPoison) ? 0 : 0xff, (rows - row) * sizeof(float));
  }
  return out;
}

template <bool kExecute>
Tensors grouped_matmul(const Tensors& x, const Tensors& all_weight, const Tensors& all_bias, const Tensors& all_scale,
                       const Tensor& layer_index, const Tensor& group_list,
                       const std::optional<Tensor>& per_token_scale, int64_t group_list_type, int64_t split_item,
                       const std::optional<ScalarType>& output_dtype) {
  const Check check{"grouped_matmul_layered"};
  check.that(x.size() == 1, "one merged activation is required");
  const Layers layers{check, all_weight, group_list, layer_index};
  layers.require(x[0], group_list_type);
  check.that(split_item == 3, "split_item must be 3");
  check.that(!all_scale.empty(), "all_scale is an empty list");
  // Without output_dtype int4 weights give bfloat16, while int8 weights keep int8: nothing that can be combined.
  const ScalarType type = output_dtype.value_or(layers.int4() ? ScalarType::BFloat16 : ScalarType::Char);
  ScalarType scale_type = ScalarType::Long;
  if (layers.int4()) {
    check.that(type == ScalarType::BFloat16 || type == ScalarType::Half, "output_dtype must be bfloat16 or float16");
  } else {
    scale_type = all_scale[0].scalar_type();
    const bool pair = (scale_type == ScalarType::BFloat16 && type == ScalarType::BFloat16) ||
                      (scale_type == ScalarType::Float && type == ScalarType::Half);
    check.that(pair, "int8 weights need output_dtype bfloat16 with bfloat16 scales, or float16 with float32 scales");
  }
  layers.require_list(all_scale, "all_scale", scale_type);
  layers.require_list(all_bias, "all_bias", layers.int4() ? ScalarType::Float : ScalarType::Int);
  const int64_t rows = x[0].size(0);
  check.that(per_token_scale.has_value(), "int8 rows need per_token_scale");
  check.one_device({&x[0], &*per_token_scale});
  check.shape(*per_token_scale, "per_token_scale", ScalarType::Float, {rows});

  const int64_t size[] = {rows, layers.width()};
  Tensors out{torch::stable::new_empty(x[0], {size, 2}, type)};
  if constexpr (kExecute) {
    const size_t layer = layers.layer();
    const std::vector<int64_t> counts = layers.counts(rows, group_list_type);
    const Weights weights = layers.of(layer);
    auto* from = static_cast<int8_t*>(x[0].mutable_data_ptr());
    const auto* from_scale = per_token_scale->const_data_ptr<float>();
    void* y = out[0].mutable_data_ptr();
    std::vector<float> values(weights.width);
    int64_t row = 0;
    for (int64_t expert = 0; expert < weights.experts; ++expert) {
      if (counts[expert] == 0) continue;
      const std::vector<int8_t> matrix = unpacked(weights, expert);
      Columns columns{floats(all_scale[layer], expert, weights.width), {}, {}};
      if (weights.int4) {
        columns.bias = floats(all_bias[layer], expert, weights.width);
      } else {
        const int32_t* bias = all_bias[layer].const_data_ptr<int32_t>() + expert * weights.width;
        columns.int_bias.assign(bias, bias + weights.width);
      }
      for (int64_t i = 0; i < counts[expert]; ++i, ++row) {
        multiply_row(from + row * weights.depth, from_scale[row], matrix.data(), weights.depth, weights.int4, columns,
                     values.data());
        for (int64_t n = 0; n < weights.width; ++n) {
          const int64_t at = row * weights.width + n;
          if (type == ScalarType::Half) {
            static_cast<Half*>(y)[at] = Half(values[n]);
          } else {
            static_cast<BFloat16*>(y)[at] = BFloat16(values[n]);
          }
        }
      }
    }
    std::memset(static_cast<char*>(y) + row * weights.width * 2, broken(kNoPoison) ? 0 : 0xff,
                (rows - row) * weights.width * 2);
    // The device may use its input as scratch memory.
    if (!broken(kKeepInput)) std::memset(from, 127, rows * weights.depth);
  }
  return out;
}

}  // namespace

template <bool kExecute>
void add_layered(torch::stable::detail::StableLibrary& library) {
  library.impl("gmm_swiglu_quant_v2_layered", TORCH_BOX(&gmm_swiglu_quant<kExecute>));
  library.impl("grouped_matmul_layered", TORCH_BOX(&grouped_matmul<kExecute>));
}

template void add_layered<true>(torch::stable::detail::StableLibrary&);
template void add_layered<false>(torch::stable::detail::StableLibrary&);

}  // namespace cam_twin
