// The four communication operators as torch ops: the checks, then the group. Meta kernels stop after the checks.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cam_twin/checks.hpp"
#include "cam_twin/group.hpp"
#include "cam_twin/ops.hpp"
#include "cam_twin/settings.hpp"

namespace cam_twin {

namespace {

Tensor placeholder(const Tensor& like) {
  const int64_t size[] = {1};
  Tensor tensor = torch::stable::new_empty(like, {size, 1}, ScalarType::Char);
  return tensor;
}

template <bool kExecute>
Tensor dispatch_send(const Tensor& x, const Tensor& expert_ids, const Tensor& comm_args, int64_t /*comm_id*/,
                     int64_t max_seq_len, int64_t batch_size, int64_t hidden_size, int64_t top_k, int64_t moe_rank_num,
                     int64_t attn_rank_num, int64_t route_expert_num_per_moe, int64_t attn_rank_id, int64_t world_size,
                     int64_t layer_index, int64_t tp_size, int64_t dynamic_quant, std::string group_name) {
  const Use use(&group_name);
  const Check check{"afd_async_dispatch_send"};
  check.one_device({&x, &expert_ids, &comm_args});
  const Topology topology{max_seq_len, hidden_size,  top_k, moe_rank_num, attn_rank_num, route_expert_num_per_moe,
                          tp_size,     dynamic_quant};
  check.topology(topology, world_size);
  check.attention_rank(topology, attn_rank_id);
  check.communication(comm_args, group_name);
  check.that(layer_index >= 0, "layer_index is negative");
  check.that(batch_size >= 1 && batch_size <= topology.most_batch(),
             "batch_size " + std::to_string(batch_size) +
                 " is outside 1..max_seq_len / tp_size = " + std::to_string(topology.most_batch()));
  check.row_type(x, "x");
  check.shape(x, "x", x.scalar_type(), {batch_size, hidden_size});
  check.shape(expert_ids, "expert_ids", ScalarType::Int, {batch_size, top_k});
  if constexpr (kExecute) {
    check.windows(topology);
    Group::join(group_name, topology, row_type_of(x))
        ->dispatch_send(attn_rank_id, layer_index, batch_size, x.const_data_ptr(),
                        expert_ids.const_data_ptr<int32_t>());
  }
  return placeholder(x);
}

template <bool kExecute>
std::vector<Tensor> dispatch_recv(const Tensor& x, const Tensor& comm_args, int64_t /*comm_id*/, int64_t max_seq_len,
                                  int64_t hidden_size, int64_t top_k, int64_t moe_rank_num, int64_t attn_rank_num,
                                  int64_t route_expert_num_per_moe, int64_t moe_rank_id, int64_t world_size,
                                  int64_t tp_size, int64_t dynamic_quant, std::string group_name) {
  const Use use(&group_name);
  const Check check{"afd_async_dispatch_recv"};
  check.one_device({&x, &comm_args});
  const Topology topology{max_seq_len, hidden_size,  top_k, moe_rank_num, attn_rank_num, route_expert_num_per_moe,
                          tp_size,     dynamic_quant};
  check.topology(topology, world_size);
  check.moe_rank(topology, moe_rank_id);
  check.communication(comm_args, group_name);
  check.anchor(x);
  std::string warning;
  const int64_t capacity = receive_capacity(std::getenv("BATCH_SIZE_FACTOR"), &warning);
  if (!warning.empty()) std::fprintf(stderr, "afd_async_dispatch_recv: %s\n", warning.c_str());

  const bool quantized = dynamic_quant != 0;
  const int64_t rows_size[] = {capacity, hidden_size};
  const int64_t scales_size[] = {quantized ? capacity : 1};
  const int64_t info_size[] = {topology.batch_info_size()};
  const int64_t counts_size[] = {route_expert_num_per_moe};
  const ScalarType row_type = quantized ? ScalarType::Char : x.scalar_type();
  std::vector<Tensor> received{torch::stable::new_empty(x, {rows_size, 2}, row_type),
                               torch::stable::new_empty(x, {scales_size, 1}, ScalarType::Float),
                               torch::stable::new_empty(x, {info_size, 1}, ScalarType::Long),
                               torch::stable::new_empty(x, {counts_size, 1}, ScalarType::Long)};
  if constexpr (kExecute) {
    check.windows(topology);
    Group::join(group_name, topology, row_type_of(x))
        ->dispatch_receive(moe_rank_id - attn_rank_num, capacity, received[0].mutable_data_ptr(),
                           received[1].mutable_data_ptr<float>(), received[2].mutable_data_ptr<int64_t>(),
                           received[3].mutable_data_ptr<int64_t>());
  }
  return received;
}

template <bool kExecute>
Tensor combine_send(const Tensor& expand_x, const Tensor& comm_args, const Tensor& batch_info, int64_t /*comm_id*/,
                    int64_t max_seq_len, int64_t hidden_size, int64_t top_k, int64_t moe_rank_num,
                    int64_t attn_rank_num, int64_t route_expert_num_per_moe, int64_t moe_rank_id, int64_t world_size,
                    int64_t tp_size, std::string group_name) {
  const Use use(&group_name);
  const Check check{"afd_async_combine_send"};
  check.one_device({&expand_x, &comm_args, &batch_info});
  Topology topology{max_seq_len, hidden_size, top_k, moe_rank_num, attn_rank_num, route_expert_num_per_moe, tp_size, 0};
  check.topology(topology, world_size);
  check.moe_rank(topology, moe_rank_id);
  check.communication(comm_args, group_name);
  const bool rows_fit = expand_x.dim() == 2 && expand_x.size(0) >= 1 && expand_x.size(1) == hidden_size;
  check.that(rows_fit, "expand_x must be [rows >= 1, " + std::to_string(hidden_size) + "]");
  if (!broken(kInt8Combine)) check.row_type(expand_x, "expand_x");
  check.shape(batch_info, "batch_info", ScalarType::Long, {topology.batch_info_size()});
  if constexpr (kExecute) {
    const auto group = Group::joined(group_name, check.operation, "dispatch receive");
    topology.quant = group->region().topology().quant;
    const RowType agreed = group->region().row_type();
    group->region().require_same(topology, broken(kInt8Combine) ? agreed : row_type_of(expand_x));
    group->combine_send(moe_rank_id - attn_rank_num, expand_x.const_data_ptr(), expand_x.size(0),
                        batch_info.const_data_ptr<int64_t>());
  }
  return placeholder(expand_x);
}

template <bool kExecute>
Tensor combine_recv(const Tensor& expand_x, const Tensor& expert_ids, const Tensor& expert_scales,
                    const Tensor& comm_args, int64_t /*comm_id*/, int64_t batch_size, int64_t hidden_size,
                    int64_t top_k, int64_t moe_rank_num, int64_t attn_rank_num, int64_t route_expert_num_per_moe,
                    int64_t attn_rank_id, int64_t world_size, std::string group_name) {
  const Use use(&group_name);
  const Check check{"afd_async_combine_recv"};
  check.one_device({&expand_x, &expert_ids, &expert_scales, &comm_args});
  // This operator is told neither max_seq_len, tp_size nor dynamic_quant.
  Topology topology{kMostSeqLen, hidden_size, top_k, moe_rank_num, attn_rank_num, route_expert_num_per_moe, 1, 0};
  check.topology(topology, world_size);
  check.attention_rank(topology, attn_rank_id);
  check.communication(comm_args, group_name);
  check.anchor(expand_x);
  check.that(batch_size >= 1, "batch_size must be at least 1");
  check.shape(expert_ids, "expert_ids", ScalarType::Int, {batch_size, top_k});
  check.shape(expert_scales, "expert_scales", ScalarType::Float, {batch_size, top_k});
  const int64_t size[] = {batch_size, hidden_size};
  Tensor out = torch::stable::new_empty(expand_x, {size, 2}, expand_x.scalar_type());
  if constexpr (kExecute) {
    const auto group = Group::joined(group_name, check.operation, "dispatch send");
    const Topology& agreed = group->region().topology();
    topology.max_seq_len = agreed.max_seq_len;
    topology.tp = agreed.tp;
    topology.quant = agreed.quant;
    group->region().require_same(topology, row_type_of(expand_x));
    group->combine_receive(attn_rank_id, batch_size, expert_ids.const_data_ptr<int32_t>(),
                           expert_scales.const_data_ptr<float>(), out.mutable_data_ptr());
  }
  return out;
}

}  // namespace

template <bool kExecute>
void add_exchange(torch::stable::detail::StableLibrary& library) {
  library.impl("afd_async_dispatch_send", TORCH_BOX(&dispatch_send<kExecute>));
  library.impl("afd_async_dispatch_recv", TORCH_BOX(&dispatch_recv<kExecute>));
  library.impl("afd_async_combine_send", TORCH_BOX(&combine_send<kExecute>));
  library.impl("afd_async_combine_recv", TORCH_BOX(&combine_recv<kExecute>));
}

template void add_exchange<true>(torch::stable::detail::StableLibrary&);
template void add_exchange<false>(torch::stable::detail::StableLibrary&);

}  // namespace cam_twin
