/* What computes experts, as the C++ step of an F rank calls it: the only border between the data plane and kernels. */
#ifndef FFN_FAAS_EXPERT_KERNEL_H
#define FFN_FAAS_EXPERT_KERNEL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One post. All memory is valid for the duration of the call and belongs to the caller. */
typedef struct ffn_item {
  int64_t link;
  int64_t rows; /* >= 0; expert_ids, weights, hidden and partial hold this many rows */
  int32_t stage;
  int32_t layer; /* bounded: an index into the expert counts that the link was opened with */
  int32_t top_k;
  int32_t hidden_size;       /* elements of a row */
  int32_t element_size;      /* bytes of an element of hidden; the kernel knows which type that is */
  const void* hidden;        /* [rows, hidden_size], in memory the peer can write: only values may depend on it */
  const int32_t* expert_ids; /* [rows, top_k] local ids, each -1 (no expert here) or below the layer's expert count */
  const float* weights;      /* [rows, top_k]; a private, checked copy like the ids */
  float* partial;            /* [rows, hidden_size] out: sum over the row's local experts of weight * expert(row) */
  int64_t* sorted_at; /* null, or out: when rows were sorted by expert (CLOCK_MONOTONIC, ns); may be left alone */
} ffn_item;

typedef struct ffn_expert_kernel {
  void* self;
  /* Writes every element of partial; rows without a local expert are exact zeros. Called without the GIL from the one
   * thread that steps, never concurrently. Returns 0, or a number that ends the F rank. Throws nothing. */
  int (*compute)(void* self, const ffn_item* item);
} ffn_expert_kernel;

#ifdef __cplusplus
}
#endif
#endif
