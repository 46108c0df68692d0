// Convolutions with steps of one pixel: all taps share the pixels in shared memory. 16 bits, channels-last.
#pragma once

#include "ops/conv/cuda/halo/gradient.cuh"
#include "ops/conv/cuda/halo/product.cuh"

namespace blocksparse::conv {
namespace {

template <class T>
Status prepare_halo() {
  BS_RETURN_IF_ERROR(prepare_halo_product<T>());
  return prepare_halo_gradient<T>();
}

template <class T>
CudaKernels make_halo(DType dtype) {
  return {CudaWay::halo, dtype, prepare_halo<T>, launch_halo_product<T>, launch_halo_gradient<T>};
}

}  // namespace
}  // namespace blocksparse::conv
