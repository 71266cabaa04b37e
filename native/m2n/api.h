/* The C border of the GPU data plane: plain numbers and pointers, so that any Python loads it with ctypes.
   Every function returns 0, or 1 with the reason in ffn_m2n_error() of the same thread. Pointers named device_* are
   device memory. A stream of NULL is the object's own stream. */
#ifndef FFN_M2N_API_H
#define FFN_M2N_API_H

#include <stdint.h>

#define FFN_M2N_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

#define FFN_M2N_VERSION 5
enum { FFN_M2N_WAIT_SORT = 1, FFN_M2N_EXPERTS = 2, FFN_M2N_COMBINE = 4, FFN_M2N_OVERLAP = 8 };

typedef struct ffn_m2n_device {
  char name[64];
  uint8_t uuid[16];
  int32_t major, minor, multiprocessors;
  uint64_t total_bytes;
} ffn_m2n_device;

/* Must equal ServiceCounters. */
typedef struct ffn_m2n_counters {
  uint64_t waits, taken, completed, rows, pairs, experts_hit, faults, items, wait_ns, compute_ns, send_ns;
} ffn_m2n_counters;

/* Times are nanoseconds of the device's globaltimer. Entry n - 1 modulo FFN_M2N_KEPT_TIMES is number n (from 1);
   numbers up to `ended` are whole, the next one may be half written. Must equal ItemTimes, PostTimes, TimesRing. */
enum { FFN_M2N_KEPT_TIMES = 8192 };
typedef struct ffn_m2n_item_times {
  uint64_t number, taken, sorted, computed, sent;
  int32_t layer, rows, parts, unused;
} ffn_m2n_item_times;
typedef struct ffn_m2n_post_times {
  uint64_t number, dispatching, dispatched, waiting, answered, summed;
  int32_t layer, rows;
} ffn_m2n_post_times;
typedef struct ffn_m2n_items {
  uint64_t ended;
  ffn_m2n_item_times kept[FFN_M2N_KEPT_TIMES];
} ffn_m2n_items;
typedef struct ffn_m2n_posts {
  uint64_t ended;
  ffn_m2n_post_times kept[FFN_M2N_KEPT_TIMES];
} ffn_m2n_posts;

typedef struct ffn_m2n_service_config {
  int32_t hidden_size, intermediate_size, top_k, num_layers, num_experts, item_rows, wait_us;
  int32_t multiprocessors;   /* that experts and combine take; 0 = all. Fewer where A's kernels wait beside them */
  int64_t weight_rows;       /* experts of all layers: first dimension of w13 and w2 */
  const void* device_w13;    /* bf16 [weight_rows, 2 I, H] */
  const void* device_w2;     /* bf16 [weight_rows, H, I] */
  const int32_t* layer_base; /* [num_layers] weight row of each layer's first expert */
} ffn_m2n_service_config;

/* Addresses of one (A rank, F rank, stage), each as seen from the calling side's device. */
typedef struct ffn_m2n_window {
  void *dispatch_flag, *dispatch_head, *dispatch_ids, *dispatch_weights, *dispatch_hidden;
  void *combine_flag, *combine_partial;
} ffn_m2n_window;

FFN_M2N_API const char* ffn_m2n_error(void);
FFN_M2N_API int ffn_m2n_version(void);

FFN_M2N_API int ffn_m2n_device_count(int32_t* count);
FFN_M2N_API int ffn_m2n_describe_device(int32_t device, ffn_m2n_device* description);
/* Binds the calling thread; every thread that calls anything below does this first. */
FFN_M2N_API int ffn_m2n_use_device(int32_t device);
/* For two GPUs in one process. */
FFN_M2N_API int ffn_m2n_enable_peer(int32_t device, int32_t peer);

/* Raw memory: never from a caching allocator, since a handle opens a whole allocation. Zeroed. */
FFN_M2N_API int ffn_m2n_allocate(uint64_t nbytes, void** device_memory);
FFN_M2N_API int ffn_m2n_free(void* device_memory);
FFN_M2N_API int ffn_m2n_export(void* device_memory, uint8_t handle[64]);
FFN_M2N_API int ffn_m2n_open(const uint8_t handle[64], void** device_memory);
FFN_M2N_API int ffn_m2n_close(void* device_memory);
/* Blocks until all bytes are there. */
FFN_M2N_API int ffn_m2n_copy(void* target, const void* source, uint64_t nbytes);

FFN_M2N_API int ffn_m2n_service_create(const ffn_m2n_service_config* config, void** service);
FFN_M2N_API int ffn_m2n_service_destroy(void* service);
/* Bytes of device memory that a service of this configuration takes beside the weights. */
FFN_M2N_API uint64_t ffn_m2n_service_bytes(const ffn_m2n_service_config* config);
/* target[e, i] = source[e, order[i]], rows of row_bytes (a multiple of 16), on the default stream. Weights have to lie
   in the row order of ffn_faas/experts/gpu_layout.py. */
FFN_M2N_API int ffn_m2n_permute_rows(void* device_target, const void* device_source, const int32_t* device_order,
                                     int32_t experts, int32_t rows, int32_t row_bytes);
/* target[place[i]] = elements start + i * width ... of a pool of pool_size bf16 values that repeats, on the default
   stream. */
FFN_M2N_API int ffn_m2n_fill_rows(void* device_target, const int32_t* device_place, const void* device_pool,
                                  uint64_t pool_size, uint64_t start, int32_t rows, int32_t width);
/* Of one thread: fill the pinned buffer, put it (rows to target[place[i]], copied and moved in a stream of its own, row
   size a multiple of 16), get the next one. */
FFN_M2N_API int ffn_m2n_uploader_create(uint64_t nbytes, void** uploader);
FFN_M2N_API int ffn_m2n_uploader_destroy(void* uploader);
FFN_M2N_API int ffn_m2n_uploader_buffer(void* uploader, void** host);
FFN_M2N_API int ffn_m2n_uploader_put(void* uploader, void* device_target, const int32_t* device_place, int32_t rows,
                                     int32_t row_bytes);
FFN_M2N_API int ffn_m2n_uploader_finish(void* uploader);
FFN_M2N_API int ffn_m2n_synchronize(void);
/* Only while nothing is in flight. first_flag = epoch << 40 | 1. A window of NULL takes the lane out. */
FFN_M2N_API int ffn_m2n_service_set_lane(void* service, int32_t lane, const ffn_m2n_window* window, int32_t capacity,
                                         uint64_t first_flag);
/* 1 when the peer of this lane sent a layer or a number of rows out of bounds. Only while nothing is in flight. */
FFN_M2N_API int ffn_m2n_service_lane_fault(void* service, int32_t lane, int32_t* fault);
/* Once for everything; parts other than all of them are for measuring. */
FFN_M2N_API int ffn_m2n_service_capture(void* service, int32_t parts);
/* Enqueue one wait -> sort -> experts -> combine, at most sixteen in flight: blocks for the sixteenth last. */
FFN_M2N_API int ffn_m2n_service_step(void* service, int32_t captured);
FFN_M2N_API int ffn_m2n_service_idle(void* service);
/* The parts named by the flags, in order, on any stream: for measuring and tests. */
FFN_M2N_API int ffn_m2n_service_enqueue(void* service, int32_t parts, void* stream);
/* 1: pending and later waits end at once with an empty item; 0: waits wait again. Any thread, never blocks. */
FFN_M2N_API void ffn_m2n_service_stop(void* service, uint32_t stop);
/* Pinned memory that the kernels write; valid until destroy. */
FFN_M2N_API const ffn_m2n_counters* ffn_m2n_service_counters(void* service);
/* Device memory that the kernels write: times of the last items. */
FFN_M2N_API const ffn_m2n_items* ffn_m2n_service_times(void* service);
FFN_M2N_API void* ffn_m2n_service_stream(void* service);

/* beside: F's kernels run on the same GPU at the same time, so that no block of ours may stand by before its turn. */
FFN_M2N_API int ffn_m2n_attention_create(int32_t stages, int32_t links, int32_t num_experts, int32_t capacity,
                                         int32_t hidden_size, int32_t top_k, uint64_t timeout_ns, int32_t beside,
                                         void** attention);
FFN_M2N_API int ffn_m2n_attention_destroy(void* attention);
/* Flags of this link count from epoch << 40. `offered`: of the session that is offered next; such links may be written
   while waits are in flight and no offer stands. */
FFN_M2N_API int ffn_m2n_attention_set_link(void* attention, int32_t stage, int32_t link, const ffn_m2n_window* window,
                                           uint64_t epoch, int32_t first_expert, int32_t offered);
/* A new session, with nothing in flight: the next post is the first, a failed wait is forgotten. */
FFN_M2N_API int ffn_m2n_attention_begin(void* attention);
/* Capturable. x bf16 [rows, H], ids i32 [rows, top_k] global, weights f32 [rows, top_k]: all device memory. */
FFN_M2N_API int ffn_m2n_attention_dispatch(void* attention, int32_t stage, int32_t layer, const void* device_x,
                                           const void* device_ids, const void* device_weights, int32_t rows,
                                           void* stream);
/* Capturable. out bf16 [rows, H], every row written; NaN when the wait failed. */
FFN_M2N_API int ffn_m2n_attention_receive(void* attention, int32_t stage, void* device_out, int32_t rows, void* stream);
/* 0: wait; 1: pending and later waits end, their results are NaN; 2: they end the CUDA context of this process, so that
   nothing computed from a missing answer is ever read. Any thread, never blocks. */
FFN_M2N_API void ffn_m2n_attention_stop(void* attention, uint32_t stop);
/* Offers the session of the links written last, by a number that no earlier offer had: waits in flight and later ones
   go over to it and send their post again. 0 withdraws an offer, before new links are written. */
FFN_M2N_API int ffn_m2n_attention_offer(void* attention, uint32_t number);
/* The offer that a stage went over to last; 0 = none. */
FFN_M2N_API int ffn_m2n_attention_active(void* attention, int32_t stage, uint32_t* number);
/* The flag that a wait in flight for more than a millisecond waits for, and the F rank; flag 0 = none. Never blocks. */
FFN_M2N_API int ffn_m2n_attention_long_wait(void* attention, int32_t stage, uint64_t* flag, int32_t* link);
/* 0 = fine, 1 = stopped, 2 = timed out. Synchronizes the device. */
FFN_M2N_API int ffn_m2n_attention_status(void* attention, int32_t stage, uint32_t* status);

/* Device memory that the kernels write: times of the last posts of a stage. */
FFN_M2N_API int ffn_m2n_attention_times(void* attention, int32_t stage, const ffn_m2n_posts** device_posts);

/* Looks at a device beside whatever waits or is captured on it: what takes longer than a tenth of a second fails. Made
   before kernels wait; then of any thread, one at a time. */
FFN_M2N_API int ffn_m2n_observer_create(void** observer);
FFN_M2N_API int ffn_m2n_observer_destroy(void* observer);
FFN_M2N_API int ffn_m2n_observer_copy(void* observer, void* host, const void* device_memory, uint64_t nbytes);
/* globaltimer and CLOCK_MONOTONIC at one moment, and how far apart those moments may be. */
FFN_M2N_API int ffn_m2n_observer_clock(void* observer, uint64_t* device_ns, int64_t* host_ns, int64_t* error_ns);

/* Reads nbytes with all multiprocessors (a ceiling to compare with). */
FFN_M2N_API int ffn_m2n_read_all(const void* device_memory, uint64_t nbytes, void* device_sink, void* stream);

#ifdef __cplusplus
}
#endif
#endif
