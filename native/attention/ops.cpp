// Attention's two torch ops, over torch's stable ABI: one build serves every torch from TORCH_TARGET_VERSION on.
// They hand raw memory to the AttentionClient that is bound; this library links nothing of the data plane.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "ffn_faas/attention_table.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::atomic<const ffn_attention_table*> bound{nullptr};
thread_local int64_t current_stage = 0;

// Becomes a RuntimeError with this very text (STD_TORCH_CHECK would put the place in this file before it).
void require(bool holds, const std::string& reason) {
  if (!holds) throw std::runtime_error(reason);
}

const ffn_attention_table& client() {
  const ffn_attention_table* table = bound.load(std::memory_order_acquire);
  require(table != nullptr, "ffn_faas: no F service is connected in this process");
  return *table;
}

int32_t dtype_of(ScalarType type) {
  if (type == ScalarType::Float) return FFN_F32;
  if (type == ScalarType::Half) return FFN_F16;
  require(type == ScalarType::BFloat16, "ffn_faas: rows are neither bfloat16, float16 nor float32");
  return FFN_BF16;
}

// Contiguous forms of an op's inputs, and the call that points into part `part` of `parts` of their rows.
struct Batch {
  Batch(const Tensor& x_in, const Tensor& weights_in, const Tensor& ids_in, int64_t stage, int64_t layer, int64_t part,
        int64_t parts)
      : x(torch::stable::contiguous(x_in)),
        weights(torch::stable::contiguous(weights_in.scalar_type() == ScalarType::Float
                                              ? weights_in
                                              : torch::stable::to(weights_in, ScalarType::Float))),
        ids(torch::stable::contiguous(ids_in)) {
    require(x.dim() == 2 && weights.dim() == 2 && ids.dim() == 2, "ffn_faas: inputs have two dimensions");
    require(ids.size(0) == x.size(0) && weights.size(0) == x.size(0) && ids.size(1) == weights.size(1),
            "ffn_faas: rows, expert ids and weights differ in number");
    const ScalarType id_type = ids.scalar_type();
    require(id_type == ScalarType::Int || id_type == ScalarType::Long,
            "ffn_faas: expert ids are neither int32 nor int64");
    require(part >= 0 && part < parts,
            "ffn_faas: there is no part " + std::to_string(part) + " of " + std::to_string(parts) + " parts");
    rows_of_part = (x.size(0) + parts - 1) / parts;
    const int64_t begin = std::min(x.size(0), part * rows_of_part);
    call.stage = stage;
    call.handle = layer;
    call.rows = std::min(x.size(0), begin + rows_of_part) - begin;
    call.hidden_size = x.size(1);
    call.top_k = ids.size(1);
    call.dtype = dtype_of(x.scalar_type());
    call.ids_are_int64 = id_type == ScalarType::Long;
    call.x = at(x, begin * call.hidden_size);
    call.ids = at(ids, begin * call.top_k);
    call.weights = weights.const_data_ptr<float>() + begin * call.top_k;
  }

  static const void* at(const Tensor& tensor, int64_t element) {
    return static_cast<const char*>(tensor.const_data_ptr()) + element * tensor.element_size();
  }

  Tensor x;
  Tensor weights;
  Tensor ids;
  int64_t rows_of_part;  // equal for all parts; the last ones may hold fewer
  ffn_attention_call call{};
};

Tensor dispatch(const Tensor& x, const Tensor& topk_weights, const Tensor& topk_ids, int64_t layer, int64_t part,
                int64_t parts) {
  const Batch batch(x, topk_weights, topk_ids, current_stage, layer, part, parts);
  const ffn_attention_table& table = client();
  char reason[2048] = {};
  const bool sent = table.dispatch(table.self, &batch.call, reason, sizeof(reason)) == 0;
  require(sent, reason);
  const int64_t size[] = {2};
  Tensor ticket = torch::stable::empty({size, 1}, ScalarType::Long);
  auto* content = ticket.mutable_data_ptr<int64_t>();
  content[0] = batch.call.stage;
  content[1] = x.size(0);
  return ticket;
}

Tensor combine(const Tensor& ticket, const Tensor& x, const Tensor& topk_weights, const Tensor& topk_ids, int64_t layer,
               int64_t part, int64_t parts) {
  const auto* content = ticket.const_data_ptr<int64_t>();
  require(content[1] == x.size(0),
          "ffn_faas: the ticket is for " + std::to_string(content[1]) + " rows, not " + std::to_string(x.size(0)));
  const Batch batch(x, topk_weights, topk_ids, content[0], layer, part, parts);
  const ffn_attention_table& table = client();
  const int64_t size[] = {batch.rows_of_part, batch.call.hidden_size};
  Tensor out = torch::stable::empty({size, 2}, x.scalar_type());
  if (batch.rows_of_part > batch.call.rows) {
    const size_t row_bytes = batch.call.hidden_size * out.element_size();
    std::memset(static_cast<char*>(out.mutable_data_ptr()) + batch.call.rows * row_bytes, 0,
                (batch.rows_of_part - batch.call.rows) * row_bytes);
  }
  char reason[2048] = {};
  const bool answered = table.combine(table.self, &batch.call, out.mutable_data_ptr(), reason, sizeof(reason)) == 0;
  require(answered, reason);
  return out;
}

}  // namespace

// Called through ctypes. The table belongs to the caller and must stay until another one, or null, is bound.
extern "C" __attribute__((visibility("default"))) int ffn_faas_bind(const ffn_attention_table* table) {
  if (table != nullptr && table->version != FFN_ATTENTION_TABLE_VERSION) return 1;
  bound.store(table, std::memory_order_release);
  return 0;
}

// The stage that dispatches of the calling thread use from now on.
extern "C" __attribute__((visibility("default"))) void ffn_faas_set_stage(int64_t stage) { current_stage = stage; }

STABLE_TORCH_LIBRARY(ffn_faas, m) {
  m.def("dispatch(Tensor x, Tensor topk_weights, Tensor topk_ids, int layer, int part=0, int parts=1) -> Tensor");
  m.def(
      "combine(Tensor ticket, Tensor x, Tensor topk_weights, Tensor topk_ids, int layer, int part=0, int parts=1) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ffn_faas, CPU, m) {
  m.impl("dispatch", TORCH_BOX(&dispatch));
  m.impl("combine", TORCH_BOX(&combine));
}
