#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(ffn_faas, m) {
  m.def("dispatch(Tensor x, Tensor topk_weights, Tensor topk_ids, int layer) -> Tensor");
  m.def("combine(Tensor ticket, Tensor x, Tensor topk_weights, Tensor topk_ids, int layer) -> Tensor");
}
