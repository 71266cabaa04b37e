/* How Attention's torch ops call the AttentionClient: the op library links nothing of the data plane and vice versa. */
#ifndef FFN_FAAS_ATTENTION_TABLE_H
#define FFN_FAAS_ATTENTION_TABLE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FFN_ATTENTION_TABLE_VERSION 1

enum ffn_dtype { FFN_F32 = 0, FFN_F16 = 1, FFN_BF16 = 2 };

/* A token batch of one layer; contiguous, owned by the caller, unchanged from dispatch to the end of combine. */
typedef struct ffn_attention_call {
  int64_t stage;
  int64_t handle; /* index into the layers the client was given */
  int64_t rows;
  int64_t hidden_size;
  int64_t top_k;
  int32_t dtype; /* ffn_dtype of x and out */
  int32_t ids_are_int64;
  const void* x;        /* [rows, hidden_size] */
  const void* ids;      /* [rows, top_k] global expert ids; -1 = no expert */
  const float* weights; /* [rows, top_k] */
} ffn_attention_call;

typedef struct ffn_attention_table {
  uint32_t version;
  void* self;
  /* Both return 0, or write a reason (NUL-terminated) and return 1. combine blocks until all F ranks answered. */
  int (*dispatch)(void* self, const ffn_attention_call* call, char* reason, size_t reason_size);
  int (*combine)(void* self, const ffn_attention_call* call, void* out, char* reason, size_t reason_size);
} ffn_attention_table;

#ifdef __cplusplus
}
#endif
#endif
