// Host side of an F rank: device state, the one graph, and the launches.
#include <algorithm>
#include <memory>

#include "experts_gpu/experts.h"
#include "m2n/api.h"
#include "m2n/flags.cuh"
#include "m2n/host.hpp"
#include "m2n/kernels.h"

namespace ffn {
namespace {

static_assert(sizeof(ServiceCounters) == sizeof(ffn_m2n_counters), "api.h repeats the counters");
static_assert(sizeof(TimesRing<ItemTimes>) == sizeof(ffn_m2n_items), "api.h repeats the times of items");

ServiceShape shape_of(const ffn_m2n_service_config& config) {
  ServiceShape shape = {};
  shape.hidden_size = config.hidden_size;
  shape.intermediate_size = config.intermediate_size;
  shape.top_k = config.top_k;
  shape.num_layers = config.num_layers;
  shape.num_experts = config.num_experts;
  shape.item_rows = config.item_rows;
  shape.wait_us = config.wait_us;
  if (shape.top_k < 1 || shape.top_k > kMaxTopK) throw std::invalid_argument("top_k must be 1 to 32");
  if (shape.num_experts < 1 || shape.num_experts > kMaxExperts) throw std::invalid_argument("1 to 1024 experts");
  if (shape.item_rows < 1 || shape.num_layers < 1) throw std::invalid_argument("rows and layers must be positive");
  return shape;
}

size_t pairs_of(const ServiceShape& shape) { return static_cast<size_t>(shape.item_rows) * shape.top_k; }
size_t tiles_of(const ServiceShape& shape) { return shape.num_experts + pairs_of(shape) / kTileRows; }

class Service {
 public:
  explicit Service(const ffn_m2n_service_config& config)
      : shape_(shape_of(config)),
        blocks_(config.multiprocessors > 0 ? std::min(config.multiprocessors, multiprocessors()) : multiprocessors()),
        state_(1),
        base_(shape_.num_layers),
        sorted_token_(pairs_of(shape_)),
        place_(pairs_of(shape_)),
        tiles_(tiles_of(shape_)),
        tile_done_(tiles_of(shape_)),
        activated_(pairs_of(shape_) * shape_.intermediate_size),
        expert_out_(pairs_of(shape_) * shape_.hidden_size) {
    check(describe_weights(shape_, config.device_w13, config.device_w2, config.weight_rows, &weights_),
          "describing the weights (hidden size must be a multiple of 128, intermediate size of 64)");
    check(prepare_experts(), "cudaFuncSetAttribute");
    check(cudaMemcpy(base_.get(), config.layer_base, base_.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    work_ = {base_.get(),      sorted_token_.get(), place_.get(),     tiles_.get(),
             tile_done_.get(), activated_.get(),    expert_out_.get()};
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    for (cudaEvent_t& event : done_) {
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync), "cudaEventCreate");
    }
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }

  ~Service() {
    stop(1);
    (void)cudaStreamSynchronize(stream_);
    if (graph_) (void)cudaGraphExecDestroy(graph_);
    for (cudaEvent_t event : done_) (void)cudaEventDestroy(event);
    (void)cudaStreamDestroy(stream_);
  }

  void set_lane(int index, const ffn_m2n_window* window, int capacity, uint64_t first_flag) {
    if (index < 0 || index >= kMaxLanes) throw std::invalid_argument("no such lane");
    Lane lane = {};
    if (window) {
      lane.expected = flag_word(first_flag);
      lane.dispatch_flag = static_cast<const uint64_t*>(window->dispatch_flag);
      lane.dispatch_head = static_cast<const int32_t*>(window->dispatch_head);
      lane.dispatch_ids = static_cast<const int32_t*>(window->dispatch_ids);
      lane.dispatch_weights = static_cast<const float*>(window->dispatch_weights);
      lane.dispatch_hidden = static_cast<const __nv_bfloat16*>(window->dispatch_hidden);
      lane.combine_flag = static_cast<uint64_t*>(window->combine_flag);
      lane.combine_partial = static_cast<__nv_bfloat16*>(window->combine_partial);
      lane.capacity = capacity;
    }
    check(cudaMemcpy(&state_.get()->lanes[index], &lane, sizeof lane, cudaMemcpyHostToDevice), "cudaMemcpy");
    num_lanes_ = std::max(num_lanes_, index + 1);
    check(cudaMemcpy(&state_.get()->num_lanes, &num_lanes_, sizeof num_lanes_, cudaMemcpyHostToDevice), "cudaMemcpy");
    // A copy may return before the last bytes are there, and no stream of ours waits for the default one.
    check(cudaStreamSynchronize(nullptr), "cudaMemcpy");
  }

  int fault(int index) {
    if (index < 0 || index >= kMaxLanes) throw std::invalid_argument("no such lane");
    int fault = 0;
    check(cudaMemcpy(&fault, &state_.get()->lanes[index].fault, sizeof fault, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return fault;
  }

  void enqueue(int parts, cudaStream_t stream) {
    if (!stream) stream = stream_;
    const bool overlap = parts & FFN_M2N_OVERLAP;
    if (parts & FFN_M2N_WAIT_SORT) {
      check(launch_wait_and_sort(stream, state_.get(), shape_, work_, stop_.device(), report_.device()), "wait");
    }
    if (parts & FFN_M2N_EXPERTS) {
      check(launch_experts(stream, overlap, blocks_, weights_, state_.get(), shape_, work_), "experts");
    }
    if (parts & FFN_M2N_COMBINE) {
      check(launch_combine(stream, overlap, blocks_, state_.get(), shape_, work_, report_.device()), "combine");
    }
  }

  void capture(int parts) {
    if (graph_) (void)cudaGraphExecDestroy(std::exchange(graph_, nullptr));
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    try {
      enqueue(parts, stream_);
    } catch (...) {
      (void)cudaStreamEndCapture(stream_, &graph);
      if (graph) (void)cudaGraphDestroy(graph);
      throw;
    }
    check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    const cudaError_t error = cudaGraphInstantiate(&graph_, graph, 0);
    (void)cudaGraphDestroy(graph);
    check(error, "cudaGraphInstantiate");
    check(cudaGraphUpload(graph_, stream_), "cudaGraphUpload");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  void step(bool captured) {
    cudaEvent_t& event = done_[turn_ % kAhead];
    if (turn_ >= kAhead) check(cudaEventSynchronize(event), "a step");
    if (captured) {
      if (!graph_) throw std::logic_error("capture comes before a captured step");
      check(cudaGraphLaunch(graph_, stream_), "cudaGraphLaunch");
    } else {
      enqueue(kStep, stream_);
    }
    check(cudaEventRecord(event, stream_), "cudaEventRecord");
    ++turn_;
  }

  void idle() { check(cudaStreamSynchronize(stream_), "a step"); }
  void stop(uint32_t value) { *const_cast<volatile uint32_t*>(stop_.host()) = value; }
  const ServiceCounters* counters() const { return report_.host(); }
  const TimesRing<ItemTimes>* times() const { return &state_.get()->times; }
  cudaStream_t stream() const { return stream_; }

 private:
  // Steps in flight. A step over empty experts takes 15 us; waking this thread took several of them.
  static constexpr int kAhead = 16;
  static constexpr int kStep = FFN_M2N_WAIT_SORT | FFN_M2N_EXPERTS | FFN_M2N_COMBINE | FFN_M2N_OVERLAP;

  ServiceShape shape_;
  int blocks_, num_lanes_ = 0;
  uint64_t turn_ = 0;
  DeviceArray<ServiceState> state_;
  DeviceArray<int32_t> base_, sorted_token_, place_;
  DeviceArray<RowTile> tiles_;
  DeviceArray<uint32_t> tile_done_;
  DeviceArray<__nv_bfloat16> activated_, expert_out_;
  PinnedValue<uint32_t> stop_;
  PinnedValue<ServiceCounters> report_;
  ExpertWeights weights_ = {};
  Workspace work_ = {};
  cudaStream_t stream_ = nullptr;
  cudaEvent_t done_[kAhead] = {};
  cudaGraphExec_t graph_ = nullptr;
};

Service& as_service(void* p) { return *static_cast<Service*>(p); }

}  // namespace
}  // namespace ffn

using ffn::as_service;
using ffn::guarded;

int ffn_m2n_service_create(const ffn_m2n_service_config* config, void** service) {
  return guarded([&] { *service = new ffn::Service(*config); });
}
int ffn_m2n_service_destroy(void* service) {
  return guarded([&] { delete static_cast<ffn::Service*>(service); });
}
uint64_t ffn_m2n_service_bytes(const ffn_m2n_service_config* config) {
  const uint64_t pairs = uint64_t(config->item_rows) * config->top_k;
  return sizeof(ffn::ServiceState) + pairs * (8 + 2 * uint64_t(config->hidden_size + config->intermediate_size));
}
int ffn_m2n_service_set_lane(void* service, int32_t lane, const ffn_m2n_window* window, int32_t capacity,
                             uint64_t first_flag) {
  return guarded([&] { as_service(service).set_lane(lane, window, capacity, first_flag); });
}
int ffn_m2n_service_lane_fault(void* service, int32_t lane, int32_t* fault) {
  return guarded([&] { *fault = as_service(service).fault(lane); });
}
int ffn_m2n_service_capture(void* service, int32_t parts) {
  return guarded([&] { as_service(service).capture(parts); });
}
int ffn_m2n_service_step(void* service, int32_t captured) {
  return guarded([&] { as_service(service).step(captured != 0); });
}
int ffn_m2n_service_idle(void* service) {
  return guarded([&] { as_service(service).idle(); });
}
int ffn_m2n_service_enqueue(void* service, int32_t parts, void* stream) {
  return guarded([&] { as_service(service).enqueue(parts, static_cast<cudaStream_t>(stream)); });
}
void ffn_m2n_service_stop(void* service, uint32_t stop) { as_service(service).stop(stop); }
const ffn_m2n_counters* ffn_m2n_service_counters(void* service) {
  return reinterpret_cast<const ffn_m2n_counters*>(as_service(service).counters());
}
const ffn_m2n_items* ffn_m2n_service_times(void* service) {
  return reinterpret_cast<const ffn_m2n_items*>(as_service(service).times());
}
void* ffn_m2n_service_stream(void* service) { return as_service(service).stream(); }
int ffn_m2n_permute_rows(void* device_target, const void* device_source, const int32_t* device_order, int32_t experts,
                         int32_t rows, int32_t row_bytes) {
  return guarded([&] {
    ffn::check(ffn::launch_permute_rows(nullptr, device_target, device_source, device_order, experts, rows, row_bytes),
               "permute_rows");
  });
}
