// The CUDA kernels: what they are given, and the table of them that cuda_kernels.inc spells out.
#pragma once

#include <cstdint>
#include <span>

#include "core/tables.h"
#include "cuda/card.h"
#include "gemm/product.h"
#include "gemm/cuda/select.h"

namespace blocksparse::gemm {

// What a kernel sees of a layout in one direction; all of it lies on the device.
struct DeviceWalk {
  const int32_t* counts = nullptr;  // pieces, splits and slots in use
  const int32_t* starts = nullptr;
  const BlockRef* refs = nullptr;
  const Piece* pieces = nullptr;
  const Split* splits = nullptr;
  const int32_t* order = nullptr;  // of strips, if their blocks are not larger
};

// Where the tables of `layout` lie; they are not looked at.
DeviceWalk walk_on_device(const LayoutView& layout, bool by_in);
const int32_t* out_of_on_device(const LayoutView& layout);

// A call on its way to a kernel.
struct CudaCall {
  const CudaProblem& problem;
  const cuda::Card& card;
  Workspace workspace;
  void* stream;
};

struct CudaProductKernel {
  CudaKernel kernel;
  DType dtype;
  Status (*prepare)();  // once for each device: loads the code, raises limits
  Status (*launch)(const Product&, const CudaCall&);
};

struct CudaGradientKernel {
  CudaKernel kernel;
  DType dtype;
  Status (*prepare)();
  Status (*launch)(const WeightGradient&, const CudaCall&);
};

#define LINEAR_CUDA_PRODUCT(kernel, dtype) CudaProductKernel cuda_product_##kernel##_##dtype();
#define LINEAR_CUDA_GRADIENT(kernel, dtype) CudaGradientKernel cuda_gradient_##kernel##_##dtype();
#include "gemm/cuda/kernels.inc"
#undef LINEAR_CUDA_PRODUCT
#undef LINEAR_CUDA_GRADIENT

}  // namespace blocksparse::gemm
