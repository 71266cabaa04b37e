// Host side of an A rank: device state of its stages, and the launches.
#include <algorithm>
#include <vector>

#include "m2n/api.h"
#include "m2n/flags.cuh"
#include "m2n/host.hpp"
#include "m2n/kernels.h"

namespace ffn {
namespace {

static_assert(sizeof(TimesRing<PostTimes>) == sizeof(ffn_m2n_posts), "api.h repeats the times of posts");

class Attention {
 public:
  Attention(int stages, int links, int num_experts, int capacity, int hidden_size, int top_k, uint64_t timeout_ns,
            bool beside)
      : stages_(stages),
        links_(links),
        capacity_(capacity),
        hidden_size_(hidden_size),
        top_k_(top_k),
        beside_(beside),
        blocks_(multiprocessors()),
        state_(stages),
        slots_(static_cast<size_t>(stages) * links * capacity),
        times_(stages),
        reports_(stages) {
    if (links < 1 || links > kMaxServiceRanks) throw std::invalid_argument("1 to 64 F ranks");
    if (hidden_size % 8 || top_k < 1 || top_k > kMaxTopK) throw std::invalid_argument("hidden_size % 8, top_k <= 32");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    for (int i = 0; i < stages; ++i) {
      AttentionStage stage = {};
      stage.num_links = links;
      stage.num_experts = num_experts;
      stage.capacity = capacity;
      stage.timeout_ns = timeout_ns;
      stage.slot = slots_.get() + static_cast<size_t>(i) * links * capacity;
      stage.times = times_.get() + i;
      write(state_.get() + i, stage);
    }
  }

  ~Attention() { (void)cudaStreamDestroy(stream_); }

  void set_link(int stage, int link, const ffn_m2n_window& window, uint64_t epoch, int first_expert, bool offered) {
    bounded(stage, stages_, "stage");
    bounded(link, links_, "link");
    AttentionLink made = {};
    made.dispatch_flag = static_cast<uint64_t*>(window.dispatch_flag);
    made.dispatch_head = static_cast<int32_t*>(window.dispatch_head);
    made.dispatch_ids = static_cast<int32_t*>(window.dispatch_ids);
    made.dispatch_weights = static_cast<float*>(window.dispatch_weights);
    made.dispatch_hidden = static_cast<__nv_bfloat16*>(window.dispatch_hidden);
    made.combine_flag = static_cast<uint64_t*>(window.combine_flag);
    made.combine_partial = static_cast<__nv_bfloat16*>(window.combine_partial);
    made.epoch = flag_word(epoch << 40);
    made.first_expert = first_expert;
    AttentionStage& target = state_.get()[stage];
    write(offered ? &target.next[link] : &target.links[link], made);
  }

  // Nothing is in flight.
  void begin() {
    for (int i = 0; i < stages_; ++i) {
      write(&state_.get()[i].sequence, uint64_t{0});
      write(&state_.get()[i].status, uint32_t{0});
    }
    stop(kRun);
  }

  // Anything may be in flight: waits go over to the links that were offered, and send their post again. Withdraws an
  // earlier offer with `number` 0.
  void offer(uint32_t number) {
    for (int i = 0; i < stages_; ++i) write(&state_.get()[i].offered, number);
  }

  uint32_t active(int stage) {
    bounded(stage, stages_, "stage");
    uint32_t number = 0;
    check(cudaMemcpyAsync(&number, &state_.get()[stage].active, sizeof number, cudaMemcpyDeviceToHost, stream_),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    return number;
  }

  void dispatch(int stage, const DispatchCall& call, cudaStream_t stream) {
    bounded(stage, stages_, "stage");
    if (call.rows < 0 || call.rows > capacity_) throw std::invalid_argument("more rows than the window holds");
    DispatchCall complete = call;
    complete.hidden_size = hidden_size_;
    complete.top_k = top_k_;
    const int blocks = std::max(1, std::min({call.rows, blocks_ * 4, kMaxShares}));
    check(launch_dispatch(stream, blocks, state_.get() + stage, complete), "dispatch");
  }

  void receive(int stage, void* out, int rows, cudaStream_t stream) {
    bounded(stage, stages_, "stage");
    const int blocks = std::min((rows * (hidden_size_ / 8) + 255) / 256, blocks_ * 8);
    check(launch_wait_replies(stream, state_.get() + stage, control_.device(), reports_.device() + stage,
                              !beside_ && blocks <= 2 * blocks_),
          "wait");
    if (rows == 0) return;
    check(launch_sum(stream, blocks, state_.get() + stage, {static_cast<__nv_bfloat16*>(out), rows, hidden_size_}),
          "sum");
  }

  void stop(uint32_t value) { *const_cast<volatile uint32_t*>(control_.host()) = value; }

  void long_wait(int stage, uint64_t* flag, int32_t* link) {
    bounded(stage, stages_, "stage");
    const volatile WaitReport& report = reports_.host()[stage];
    *flag = report.flag;
    *link = static_cast<int32_t>(report.link);
  }

  const TimesRing<PostTimes>* times(int stage) const {
    bounded(stage, stages_, "stage");
    return times_.get() + stage;
  }

  uint32_t status(int stage) {
    bounded(stage, stages_, "stage");
    uint32_t status = 0;
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    check(cudaMemcpy(&status, &state_.get()[stage].status, sizeof status, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return status;
  }

 private:
  // Beside kernels that wait: no copy of the default stream may be used, it would wait for them.
  template <typename T>
  void write(T* device, const T& value) {
    check(cudaMemcpyAsync(device, &value, sizeof value, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  static void bounded(int value, int limit, const char* name) {
    if (value < 0 || value >= limit) throw std::invalid_argument(std::string(name) + " out of bounds");
  }

  int stages_, links_, capacity_, hidden_size_, top_k_;
  bool beside_;
  int blocks_;
  DeviceArray<AttentionStage> state_;
  DeviceArray<int32_t> slots_;
  DeviceArray<TimesRing<PostTimes>> times_;
  PinnedArray<WaitReport> reports_;
  PinnedValue<uint32_t> control_;
  cudaStream_t stream_ = nullptr;
};

Attention& as_attention(void* p) { return *static_cast<Attention*>(p); }

}  // namespace
}  // namespace ffn

using ffn::as_attention;
using ffn::guarded;

int ffn_m2n_attention_create(int32_t stages, int32_t links, int32_t num_experts, int32_t capacity, int32_t hidden_size,
                             int32_t top_k, uint64_t timeout_ns, int32_t beside, void** attention) {
  return guarded([&] {
    *attention = new ffn::Attention(stages, links, num_experts, capacity, hidden_size, top_k, timeout_ns, beside != 0);
  });
}
int ffn_m2n_attention_destroy(void* attention) {
  return guarded([&] { delete static_cast<ffn::Attention*>(attention); });
}
int ffn_m2n_attention_set_link(void* attention, int32_t stage, int32_t link, const ffn_m2n_window* window,
                               uint64_t epoch, int32_t first_expert, int32_t offered) {
  return guarded([&] { as_attention(attention).set_link(stage, link, *window, epoch, first_expert, offered != 0); });
}
int ffn_m2n_attention_offer(void* attention, uint32_t number) {
  return guarded([&] { as_attention(attention).offer(number); });
}
int ffn_m2n_attention_active(void* attention, int32_t stage, uint32_t* number) {
  return guarded([&] { *number = as_attention(attention).active(stage); });
}
int ffn_m2n_attention_long_wait(void* attention, int32_t stage, uint64_t* flag, int32_t* link) {
  return guarded([&] { as_attention(attention).long_wait(stage, flag, link); });
}
int ffn_m2n_attention_begin(void* attention) {
  return guarded([&] { as_attention(attention).begin(); });
}
int ffn_m2n_attention_dispatch(void* attention, int32_t stage, int32_t layer, const void* device_x,
                               const void* device_ids, const void* device_weights, int32_t rows, void* stream) {
  return guarded([&] {
    ffn::DispatchCall call = {};
    call.x = static_cast<const __nv_bfloat16*>(device_x);
    call.ids = static_cast<const int32_t*>(device_ids);
    call.weights = static_cast<const float*>(device_weights);
    call.rows = rows;
    call.layer = layer;
    as_attention(attention).dispatch(stage, call, static_cast<cudaStream_t>(stream));
  });
}
int ffn_m2n_attention_receive(void* attention, int32_t stage, void* device_out, int32_t rows, void* stream) {
  return guarded([&] { as_attention(attention).receive(stage, device_out, rows, static_cast<cudaStream_t>(stream)); });
}
void ffn_m2n_attention_stop(void* attention, uint32_t stop) { as_attention(attention).stop(stop); }
int ffn_m2n_attention_status(void* attention, int32_t stage, uint32_t* status) {
  return guarded([&] { *status = as_attention(attention).status(stage); });
}
int ffn_m2n_attention_times(void* attention, int32_t stage, const ffn_m2n_posts** device_posts) {
  return guarded([&] { *device_posts = reinterpret_cast<const ffn_m2n_posts*>(as_attention(attention).times(stage)); });
}
