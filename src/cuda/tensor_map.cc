#include "cuda/tensor_map.h"

#include <cuda_runtime_api.h>

#include "cuda/error.h"

namespace blocksparse::cuda {

namespace {

// The driver's library is not linked. The runtime finds its functions.
template <class Function>
Result<Function> driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result);
#endif
  BS_RETURN_IF_ERROR(status_of(error, name));
  if (function != nullptr && result == cudaDriverEntryPointSuccess) return reinterpret_cast<Function>(function);
  return Status(StatusCode::unavailable, concat("[cuda] this driver has no ", name));
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);
using EncodeImages = decltype(&cuTensorMapEncodeIm2col);

Result<EncodeTiled> tiled_encoder() {
  static const auto found = driver_function<EncodeTiled>("cuTensorMapEncodeTiled");
  return found;
}

Result<EncodeImages> image_encoder() {
  static const auto found = driver_function<EncodeImages>("cuTensorMapEncodeIm2col");
  return found;
}

CUtensorMapSwizzle swizzle_of(uint32_t columns) {
  return columns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
         : columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                         : CU_TENSOR_MAP_SWIZZLE_32B;
}

// The box of first pixels ends far enough beyond the last pixel to hold all positions.
int64_t upper_corner(const BoxedImages& m, int axis) {
  return m.first[axis] + (m.positions[axis] - 1) * m.stride[axis] + 1 - m.size[axis];
}

}  // namespace

Status prepare_tensor_maps() {
  BS_RETURN_IF_ERROR(tiled_encoder().status());
  return image_encoder().status();
}

Status make_tensor_map(const BoxedMatrix& m, CUtensorMap& map) {
  const auto encode = tiled_encoder();
  if (!encode.ok()) return encode.status();
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(m.columns), static_cast<cuuint64_t>(m.rows),
                               static_cast<cuuint64_t>(m.matrices)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(m.row_stride) * 2,
                                 static_cast<cuuint64_t>(m.matrix_stride) * 2};
  const cuuint32_t box[3] = {m.box_columns, m.box_rows, 1}, steps[3] = {1, 1, 1};
  const CUresult result =
      (*encode)(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, m.matrices > 0 ? 3 : 2, const_cast<void*>(m.data), sizes, strides,
                box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(m.box_columns),
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {StatusCode::unavailable, concat("[cuda] no tensor map of ", m.columns, " x ", m.rows, " in steps of ",
                                          m.row_stride, ": error ", static_cast<int>(result))};
}

Status make_image_map(const BoxedImages& m, CUtensorMap& map) {
  const auto encode = image_encoder();
  if (!encode.ok()) return encode.status();
  const auto rank = static_cast<cuuint32_t>(m.dimensions) + 2;
  cuuint64_t sizes[5] = {static_cast<cuuint64_t>(m.channels)}, strides[4];
  cuuint32_t steps[5] = {1};
  int lower[3], upper[3];
  cuuint64_t stride = static_cast<cuuint64_t>(m.channels) * 2;
  for (int axis = 0; axis < m.dimensions; ++axis) {
    sizes[axis + 1] = static_cast<cuuint64_t>(m.size[axis]);
    strides[axis] = stride;
    stride *= sizes[axis + 1];
    steps[axis + 1] = static_cast<cuuint32_t>(m.stride[axis]);
    lower[axis] = m.first[axis];
    upper[axis] = static_cast<int>(upper_corner(m, axis));
  }
  sizes[rank - 1] = static_cast<cuuint64_t>(m.n);
  strides[rank - 2] = stride;
  steps[rank - 1] = 1;
  const CUresult result =
      (*encode)(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, rank, const_cast<void*>(m.data), sizes, strides, lower, upper,
                m.box_channels, m.box_positions, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(m.box_channels),
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {StatusCode::unavailable, concat("[cuda] no tensor map of ", m.n, " images of ", m.channels, " channels, ",
                                          m.size[0], " wide: error ", static_cast<int>(result))};
}

}  // namespace blocksparse::cuda
