// Experts over the AMX path with emulated tiles, or over the scalar path, for ctypes: see emulated.py.
#include <stdexcept>
#include <string>

#include "experts_cpu/dispatch.hpp"
#include "experts_cpu/experts.hpp"

namespace ffn::cpu {

const Path& choose_path(Type type, const std::string& name) {
  const Path* path = name == "amx" ? amx_path(type) : scalar_path(type);
  if (path == nullptr) throw std::invalid_argument(name);
  return *path;
}

}  // namespace ffn::cpu

#define API extern "C" __attribute__((visibility("default")))

using ffn::cpu::Experts;
using ffn::cpu::Matrix;

API Experts* experts_new(int64_t layers, int64_t experts, int64_t hidden, int64_t inter, int32_t dtype, int threads,
                         const char* path) {
  try {
    return new Experts(layers, experts, {hidden, inter, static_cast<ffn::cpu::Type>(dtype)}, threads, path);
  } catch (const std::exception&) {  // none may pass through ctypes
    return nullptr;
  }
}

API void experts_delete(Experts* self) { delete self; }

API void experts_pack(Experts* self, int64_t layer, int64_t expert, int32_t matrix, const void* source) {
  self->pack(layer, expert, static_cast<Matrix>(matrix), source);
}

API int experts_compute(Experts* self, int32_t layer, int64_t rows, int32_t top_k, const void* hidden,
                        const int32_t* ids, const float* weights, float* partial) {
  ffn_item item{};
  item.rows = rows;
  item.layer = layer;
  item.top_k = top_k;
  item.hidden_size = static_cast<int32_t>(self->layout().hidden);
  item.element_size = static_cast<int32_t>(size_of(self->layout().type));
  item.hidden = hidden;
  item.expert_ids = ids;
  item.weights = weights;
  item.partial = partial;
  return self->compute(item);
}
