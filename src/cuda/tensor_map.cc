#include "cuda/tensor_map.h"

#include <cuda_runtime_api.h>

#include "cuda/error.h"

namespace blocksparse::cuda {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's library is not linked, it is asked for through the runtime.
Result<Encode> encoder() {
  static const Result<Encode> found = []() -> Result<Encode> {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    BS_RETURN_IF_ERROR(status_of(error, "cuTensorMapEncodeTiled"));
    if (function != nullptr && result == cudaDriverEntryPointSuccess) return reinterpret_cast<Encode>(function);
    return Status(StatusCode::unavailable, "[cuda] this driver has no cuTensorMapEncodeTiled");
  }();
  return found;
}

}  // namespace

Status prepare_tensor_maps() { return encoder().status(); }

Status make_tensor_map(const BoxedMatrix& m, CUtensorMap& map) {
  const auto encode = encoder();
  if (!encode.ok()) return encode.status();
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(m.columns), static_cast<cuuint64_t>(m.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(m.row_stride) * 2};
  const cuuint32_t box[2] = {m.box_columns, m.box_rows}, steps[2] = {1, 1};
  const CUresult result = (*encode)(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, const_cast<void*>(m.data), sizes, strides,
                                    box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                    m.box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {StatusCode::unavailable, concat("[cuda] no tensor map of ", m.columns, " x ", m.rows, " in steps of ",
                                          m.row_stride, ": error ", static_cast<int>(result))};
}

}  // namespace blocksparse::cuda
