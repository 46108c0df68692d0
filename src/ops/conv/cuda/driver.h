// The convolution's CUDA kernels: their arguments, and the functions that list them.
#pragma once

#include "cuda/card.h"
#include "ops/conv/conv.h"
#include "ops/conv/cuda/select.h"

namespace blocksparse::conv {

struct CudaCall {
  const cuda::Card& card;
  Workspace workspace;
  void* stream;
};

// The kernels of a way for one element type.
struct CudaKernels {
  CudaWay way;
  DType dtype;
  Status (*prepare)();                                 // once for each device
  Status (*product)(const Product&, const CudaCall&);  // null: none
  Status (*gradient)(const WeightGradient&, const CudaCall&);
};

CudaKernels cuda_generic_f32();
CudaKernels cuda_generic_f64();
CudaKernels cuda_generic_bf16();
CudaKernels cuda_generic_f16();
CudaKernels cuda_gather_bf16();
CudaKernels cuda_gather_f16();
CudaKernels cuda_halo_bf16();
CudaKernels cuda_halo_f16();
CudaKernels cuda_halo_block_bf16();
CudaKernels cuda_halo_block_f16();

}  // namespace blocksparse::conv
