// vLLM's own CPU kernel as an ffn_expert_kernel: an operator of vLLM's library, called through torch's dispatcher from
// the C++ step, so that no Python runs between a post and its answer. The caller loads vLLM's library, packs the
// weights (vllm_kernel.py) and keeps them; this library links nothing of the data plane. Not over torch's stable ABI:
// there each call leaks its two strings (torch 2.13). So it fits one torch only, as vLLM's library does.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/from_blob.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ffn_faas/expert_kernel.h"

namespace {

using at::ScalarType;
using at::Tensor;

// Contiguous, over memory of the caller.
Tensor tensor_at(const void* data, at::IntArrayRef size, ScalarType type) {
  return at::from_blob(const_cast<void*>(data), size, at::TensorOptions().dtype(type));
}

template <typename T>
void widen(const void* source, float* target, int64_t count) {
  const auto* values = static_cast<const T*>(source);
  for (int64_t i = 0; i < count; ++i) target[i] = static_cast<float>(values[i]);
}

template <typename T>
void add_widened(const void* source, float* target, int64_t count) {
  const auto* values = static_cast<const T*>(source);
  for (int64_t i = 0; i < count; ++i) target[i] += static_cast<float>(values[i]);
}

// One layer's weights as vLLM's prepack_moe_weight leaves them.
struct Layer {
  Tensor w13;  // [experts, 2 * inter, hidden]
  Tensor w2;   // [experts, hidden, inter]
  std::optional<Tensor> b13;
  std::optional<Tensor> b2;
};

class VllmExperts {
 public:
  VllmExperts(int64_t experts, int64_t hidden, int64_t inter, ScalarType type, std::string activation, std::string isa,
              int64_t scratch_bytes)
      : experts_(experts),
        hidden_(hidden),
        inter_(inter),
        scratch_bytes_(scratch_bytes),
        type_(type),
        row_bytes_(hidden * (type == ScalarType::Float ? 4 : 2)),
        activation_(std::move(activation)),
        isa_(std::move(isa)) {}

  void add_layer(const void* w13, const void* w2, const void* b13, const void* b2) {
    Layer layer{tensor_at(w13, {experts_, 2 * inter_, hidden_}, type_),
                tensor_at(w2, {experts_, hidden_, inter_}, type_),
                {},
                {}};
    if (b13 != nullptr) layer.b13 = tensor_at(b13, {experts_, 2 * inter_}, type_);
    if (b2 != nullptr) layer.b2 = tensor_at(b2, {experts_, hidden_}, type_);
    layers_.push_back(std::move(layer));
  }

  // The kernel takes no id below zero (it would write out of bounds), and its result is rounded to the weights' type.
  // So an item whose rows have all their experts here is one call exactly as stock makes it. Else rows without an
  // expert are left out (padding); and if a row has some of its experts here, each (row, expert) pair becomes a row of
  // its own with one expert, and the results are summed in f32: no foreign expert is computed.
  void compute(const ffn_item& item) {
    if (item.hidden_size != hidden_ || item.element_size * hidden_ != row_bytes_) {
      throw std::invalid_argument("they are not of this model");
    }
    const int64_t top_k = item.top_k;
    rows_.clear();
    pairs_ = 0;
    bool whole = true;
    for (int64_t row = 0; row < item.rows; ++row) {
      const int32_t* ids = item.expert_ids + row * top_k;
      const int64_t here = std::count_if(ids, ids + top_k, [](int32_t id) { return id >= 0; });
      if (here > 0) rows_.push_back(row);
      pairs_ += here;
      whole = whole && (here == 0 || here == top_k);
    }
    if (whole && static_cast<int64_t>(rows_.size()) == item.rows) {
      compute_all(item);
    } else if (whole) {
      compute_occupied(item);
    } else {
      compute_pairs(item);
    }
  }

  // With what follows from the model filled in.
  ffn_item item() const {
    ffn_item result{};
    result.hidden_size = static_cast<int32_t>(hidden_);
    result.element_size = static_cast<int32_t>(row_bytes_ / hidden_);
    return result;
  }

 private:
  void compute_all(const ffn_item& item) {
    call(item.layer, item.rows, item.top_k, item.hidden, item.expert_ids, item.weights);
    convert(result_.data(), item.partial, item.rows * hidden_);
  }

  void compute_occupied(const ffn_item& item) {
    const int64_t top_k = item.top_k;
    start_gathering(static_cast<int64_t>(rows_.size()));
    for (const int64_t row : rows_) gather(item, row, row * top_k, top_k);
    call_gathered(item.layer, top_k);
    std::memset(item.partial, 0, item.rows * hidden_ * sizeof(float));
    const char* result = result_.data();
    for (const int64_t row : rows_) {
      convert(result, item.partial + row * hidden_, hidden_);
      result += row_bytes_;
    }
  }

  void compute_pairs(const ffn_item& item) {
    const int64_t top_k = item.top_k;
    start_gathering(pairs_);
    std::vector<int64_t> row_of_pair;
    for (const int64_t row : rows_) {
      for (int64_t slot = row * top_k; slot < (row + 1) * top_k; ++slot) {
        if (item.expert_ids[slot] < 0) continue;
        gather(item, row, slot, 1);
        row_of_pair.push_back(row);
      }
    }
    call_gathered(item.layer, 1);
    std::memset(item.partial, 0, item.rows * hidden_ * sizeof(float));
    const char* result = result_.data();
    for (const int64_t row : row_of_pair) {
      add(result, item.partial + row * hidden_, hidden_);
      result += row_bytes_;
    }
  }

  void start_gathering(int64_t rows) {
    gathered_hidden_.clear();
    gathered_ids_.clear();
    gathered_weights_.clear();
    gathered_hidden_.reserve(rows * row_bytes_);
    gathered_ids_.reserve(pairs_);
    gathered_weights_.reserve(pairs_);
  }

  void gather(const ffn_item& item, int64_t row, int64_t first_slot, int64_t slots) {
    const char* hidden = static_cast<const char*>(item.hidden) + row * row_bytes_;
    gathered_hidden_.insert(gathered_hidden_.end(), hidden, hidden + row_bytes_);
    gathered_ids_.insert(gathered_ids_.end(), item.expert_ids + first_slot, item.expert_ids + first_slot + slots);
    gathered_weights_.insert(gathered_weights_.end(), item.weights + first_slot, item.weights + first_slot + slots);
  }

  void call_gathered(int32_t layer, int64_t top_k) {
    call(layer, static_cast<int64_t>(gathered_ids_.size()) / top_k, top_k, gathered_hidden_.data(),
         gathered_ids_.data(), gathered_weights_.data());
  }

  // Stock's call into result_ [rows, hidden]; every id is valid. The kernel's scratch memory is bounded (its offsets
  // are 32-bit); a row's result does not depend on the others, so that splitting is exact.
  void call(int32_t layer, int64_t rows, int64_t top_k, const void* hidden, const int32_t* ids, const float* weights) {
    if (static_cast<int64_t>(result_.size()) < rows * row_bytes_) result_.resize(rows * row_bytes_);
    const int64_t scratch_of_row = top_k * (4 * hidden_ + row_bytes_ / hidden_ * inter_ + 8);
    const int64_t most = std::max<int64_t>(1, scratch_bytes_ / scratch_of_row);
    for (int64_t begin = 0; begin < rows; begin += most) {
      const int64_t count = std::min(most, rows - begin);
      call_operator(layers_.at(layer), tensor_at(result_.data() + begin * row_bytes_, {count, hidden_}, type_),
                    tensor_at(static_cast<const char*>(hidden) + begin * row_bytes_, {count, hidden_}, type_),
                    tensor_at(weights + begin * top_k, {count, top_k}, ScalarType::Float),
                    tensor_at(ids + begin * top_k, {count, top_k}, ScalarType::Int));
    }
  }

  // cpu_fused_moe(output!, input, w13, w2, w13_bias?, w2_bias?, topk_weights, topk_id, skip_weighted, act, isa)
  void call_operator(const Layer& layer, const Tensor& output, const Tensor& input, const Tensor& weights,
                     const Tensor& ids) {
    stack_.clear();
    torch::jit::push(stack_, output, input, layer.w13, layer.w2, layer.b13, layer.b2, weights, ids, false, activation_,
                     isa_);
    operator_.callBoxed(&stack_);
  }

  void convert(const void* source, float* target, int64_t count) const {
    if (type_ == ScalarType::Float) std::memcpy(target, source, count * sizeof(float));
    if (type_ == ScalarType::BFloat16) widen<at::BFloat16>(source, target, count);
    if (type_ == ScalarType::Half) widen<at::Half>(source, target, count);
  }

  void add(const void* source, float* target, int64_t count) const {
    if (type_ == ScalarType::Float) add_widened<float>(source, target, count);
    if (type_ == ScalarType::BFloat16) add_widened<at::BFloat16>(source, target, count);
    if (type_ == ScalarType::Half) add_widened<at::Half>(source, target, count);
  }

  const int64_t experts_;
  const int64_t hidden_;
  const int64_t inter_;  // as packed: padded
  const int64_t scratch_bytes_;
  const ScalarType type_;
  const int64_t row_bytes_;
  const std::string activation_;
  const std::string isa_;
  const c10::OperatorHandle operator_ = c10::Dispatcher::singleton().findSchemaOrThrow("_C::cpu_fused_moe", "");
  std::vector<Layer> layers_;
  torch::jit::Stack stack_;
  // Of one item.
  std::vector<int64_t> rows_;  // with at least one expert
  int64_t pairs_ = 0;          // (row, expert)
  std::vector<char> gathered_hidden_;
  std::vector<int32_t> gathered_ids_;
  std::vector<float> gathered_weights_;
  std::vector<char> result_;
};

int compute(void* self, const ffn_item* item) {
  try {
    static_cast<VllmExperts*>(self)->compute(*item);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ffn_faas: vLLM's kernel failed on %lld rows of layer %d: %s\n",
                 static_cast<long long>(item->rows), item->layer, error.what());
    return 1;
  }
}

struct Handle {
  VllmExperts experts;
  ffn_expert_kernel kernel;
};

}  // namespace

// All called through ctypes by one thread at a time. ``dtype`` is the number of a torch ScalarType.
#define EXPORTED extern "C" __attribute__((visibility("default")))

// Of the torch that this library was built for.
EXPORTED const char* ffn_faas_vllm_experts_torch_version() { return TORCH_VERSION; }

// Null when vLLM's library is not loaded, with the reason on stderr.
EXPORTED void* ffn_faas_vllm_experts_new(int64_t experts, int64_t hidden, int64_t inter, int32_t dtype,
                                         const char* activation, const char* isa, int64_t scratch_bytes) {
  try {
    auto* handle =
        new Handle{{experts, hidden, inter, static_cast<ScalarType>(dtype), activation, isa, scratch_bytes}, {}};
    handle->kernel = {&handle->experts, compute};
    return handle;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ffn_faas: vLLM's kernel cannot be called: %s\n", error.what());
    return nullptr;
  }
}

// Weights and biases (null: none) belong to the caller and must outlive the handle.
EXPORTED void ffn_faas_vllm_experts_add_layer(void* handle, const void* w13, const void* w2, const void* b13,
                                              const void* b2) {
  static_cast<Handle*>(handle)->experts.add_layer(w13, w2, b13, b2);
}

// The ffn_expert_kernel, valid until the handle is deleted.
EXPORTED const ffn_expert_kernel* ffn_faas_vllm_experts_kernel(void* handle) {
  return &static_cast<Handle*>(handle)->kernel;
}

EXPORTED int ffn_faas_vllm_experts_compute(void* handle, int32_t layer, int64_t rows, int32_t top_k, const void* hidden,
                                           const int32_t* ids, const float* weights, float* out) {
  ffn_item item = static_cast<Handle*>(handle)->experts.item();
  item.layer = layer;
  item.rows = rows;
  item.top_k = top_k;
  item.hidden = hidden;
  item.expert_ids = ids;
  item.weights = weights;
  item.partial = out;
  return compute(&static_cast<Handle*>(handle)->experts, &item);
}

EXPORTED void ffn_faas_vllm_experts_delete(void* handle) { delete static_cast<Handle*>(handle); }
