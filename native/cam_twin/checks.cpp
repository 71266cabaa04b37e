#include "cam_twin/checks.hpp"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "cam_twin/settings.hpp"

namespace cam_twin {

namespace {

constexpr int64_t kDefaultWindowMib = 408;

const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Char:
      return "int8";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    default:
      return "another type";
  }
}

std::string text_of(std::initializer_list<int64_t> sizes) {
  std::string text = "[";
  for (const int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

std::string in(int64_t value, int64_t low, int64_t high) {
  return std::to_string(value) + " is outside " + std::to_string(low) + ".." + std::to_string(high);
}

}  // namespace

void Check::that(bool holds, const std::string& reason) const {
  if (!holds && !broken(kNoChecks)) throw std::runtime_error(std::string(operation) + ": " + reason);
}

void Check::shape(const Tensor& tensor, const char* name, ScalarType type, std::initializer_list<int64_t> sizes) const {
  const bool fits = tensor.scalar_type() == type && tensor.dim() == static_cast<int64_t>(sizes.size()) &&
                    std::equal(sizes.begin(), sizes.end(), tensor.sizes().begin());
  that(fits, std::string(name) + " must be " + name_of(type) + " " + text_of(sizes));
  that(tensor.is_contiguous(), std::string(name) + " must be contiguous");
}

void Check::row_type(const Tensor& tensor, const char* name) const {
  const ScalarType type = tensor.scalar_type();
  that(type == ScalarType::Half || type == ScalarType::BFloat16,
       std::string(name) + " must be float16 or bfloat16, not " + name_of(type));
  that(tensor.is_contiguous(), std::string(name) + " must be contiguous");
}

void Check::anchor(const Tensor& tensor) const {
  row_type(tensor, "the anchor");
  that(tensor.numel() == 1, "the anchor must have one element");
}

void Check::one_device(std::initializer_list<const Tensor*> tensors) const {
  for (const Tensor* tensor : tensors) {
    that(tensor->is_cpu() == (*tensors.begin())->is_cpu(), "the inputs must be on one device");
  }
}

void Check::topology(const Topology& t, int64_t world) const {
  that(t.moe_ranks >= 1 && t.attn_ranks >= 1 && t.experts >= 1, "ranks and experts must be positive");
  that(world == t.attn_ranks + t.moe_ranks,
       "world_size " + std::to_string(world) + " is not attn_rank_num + moe_rank_num");
  that(t.hidden >= 32 && t.hidden % 32 == 0, "hidden_size must be a multiple of 32");
  that(t.top_k >= 1 && t.top_k <= t.moe_ranks * t.experts, "top_k " + in(t.top_k, 1, t.moe_ranks * t.experts));
  that(t.tp >= 1 && t.attn_ranks % t.tp == 0,
       "tp_size " + std::to_string(t.tp) + " does not divide attn_rank_num " + std::to_string(t.attn_ranks));
  that(t.max_seq_len >= t.tp && t.max_seq_len <= kMostSeqLen, "max_seq_len " + in(t.max_seq_len, t.tp, kMostSeqLen));
  that(t.quant == 0 || t.quant == 1, "dynamic_quant must be 0 or 1");
}

void Check::attention_rank(const Topology& t, int64_t rank) const {
  that(rank >= 0 && rank < t.attn_ranks, "attn_rank_id " + in(rank, 0, t.attn_ranks - 1));
}

void Check::moe_rank(const Topology& t, int64_t rank) const {
  that(rank >= t.attn_ranks && rank < t.attn_ranks + t.moe_ranks,
       "moe_rank_id must be a global rank: " + in(rank, t.attn_ranks, t.attn_ranks + t.moe_ranks - 1));
}

void Check::communication(const Tensor& comm_args, const std::string& group) const {
  that(comm_args.scalar_type() == ScalarType::Half, "comm_args must be float16");
  that(!group.empty(), "group_name is empty");
}

void Check::windows(const Topology& t) const {
  const char* text = std::getenv("LCCL_BUFFER_SIZE");
  const int64_t mib = text != nullptr ? std::atoll(text) : kDefaultWindowMib;
  const int64_t needed = std::max(attention_window_bytes(t), moe_window_bytes(t));
  that(needed <= mib * 1024 * 1024,
       "the windows need " + std::to_string(needed) + " bytes, LCCL_BUFFER_SIZE is " + std::to_string(mib) + " MiB");
}

RowType row_type_of(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Half ? kHalf : kBFloat16; }

}  // namespace cam_twin
