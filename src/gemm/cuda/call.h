// A call as a family of CUDA kernels receives it, and what a family compiles for a type.
#pragma once

#include "cuda/card.h"
#include "gemm/cuda/problem.h"
#include "gemm/cuda/walk.h"
#include "gemm/product.h"

namespace blocksparse::gemm {

struct CudaCall {
  const CudaProblem& problem;
  const cuda::Card& card;
  Workspace workspace;
  void* stream;
};

struct FamilyKernels {
  Status (*prepare)();  // once for each device: loads the code, raises limits
  Status (*product)(const Product&, const CudaCall&) = nullptr;
  Status (*gradient)(const WeightGradient&, const CudaCall&) = nullptr;
};

// kernels<dtype>() of each family, which <family>/<dtype>.cu defines.
#define BS_FAMILY(name, ...) \
  namespace name {           \
  template <DType>           \
  FamilyKernels kernels();   \
  }
#include "gemm/cuda/families.inc"
#undef BS_FAMILY

}  // namespace blocksparse::gemm
