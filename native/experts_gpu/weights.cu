// Tensor maps of the resident weights. The driver's encoder is found through the runtime: nothing links libcuda.
#include "experts_gpu/experts.h"

namespace ffn {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

cudaError_t find_encoder(Encode* encode) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
  *encode = reinterpret_cast<Encode>(entry);
  return cudaSuccess;
}

// data [experts, rows, columns]; a box is 256 rows by the 128 bytes of one swizzle.
cudaError_t encode_map(Encode encode, CUtensorMap* map, const void* data, cuuint64_t experts, cuuint64_t rows,
                       cuuint64_t columns) {
  const cuuint64_t sizes[3] = {columns, rows, experts}, strides[2] = {2 * columns, 2 * columns * rows};
  const cuuint32_t box[3] = {64, 256, 1}, ones[3] = {1, 1, 1};
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), sizes, strides, box,
                                 ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// target row i of each expert = source row order[i]; a block moves one row.
__global__ void __launch_bounds__(128)
    permute_rows(uint4* target, const uint4* source, const int32_t* order, int rows, int pieces) {
  const int64_t expert = blockIdx.x / rows, row = blockIdx.x % rows;
  const uint4* from = source + (expert * rows + order[row]) * pieces;
  uint4* to = target + (expert * rows + row) * pieces;
  for (int i = threadIdx.x; i < pieces; i += blockDim.x) to[i] = from[i];
}

}  // namespace

cudaError_t describe_weights(const ServiceShape& shape, const void* w13, const void* w2, int64_t experts,
                             ExpertWeights* weights) {
  if (shape.hidden_size % 128 || shape.intermediate_size % 64) return cudaErrorInvalidValue;
  Encode encode = nullptr;
  const cudaError_t error = find_encoder(&encode);
  if (error != cudaSuccess) return error;
  const cudaError_t first =
      encode_map(encode, &weights->w13, w13, experts, 2 * shape.intermediate_size, shape.hidden_size);
  if (first != cudaSuccess) return first;
  return encode_map(encode, &weights->w2, w2, experts, shape.hidden_size, shape.intermediate_size);
}

cudaError_t launch_permute_rows(cudaStream_t stream, void* target, const void* source, const int32_t* order,
                                int experts, int rows, int row_bytes) {
  permute_rows<<<experts * rows, 128, 0, stream>>>(static_cast<uint4*>(target), static_cast<const uint4*>(source),
                                                   order, rows, row_bytes / 16);
  return cudaGetLastError();
}

}  // namespace ffn
