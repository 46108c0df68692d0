// Helpers of the files that launch the layer norm's kernels.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "cuda/card.h"
#include "cuda/launch.h"
#include "cuda/number.h"
#include "ops/norm/norm.h"

namespace blocksparse::norm {

struct CudaPlace {
  cuda::Card card;
  cudaStream_t stream;
  bool overlap;  // a kernel may begin before the kernel in front has ended
};

// The place on the current device, which is `device`. Its kernels are loaded.
Result<CudaPlace> place_of(Device device, Stream stream);

// Calls body(place) on the device.
template <class Body>
Status on_device(Device device, Stream stream, Body body) {
  const cuda::OnDevice on(device);
  BS_RETURN_IF_ERROR(on.status());
  const auto place = place_of(device, stream);
  return place.ok() ? body(*place) : place.status();
}

template <class Body>
Status with_type(DType dtype, Body body) {
  switch (dtype) {
    case DType::f32: return body.template operator()<float>();
    case DType::f64: return body.template operator()<double>();
    case DType::bf16: return body.template operator()<Bf16>();
    case DType::f16: break;
  }
  return body.template operator()<F16>();
}

// Whether rows can be read in vectors of `vector` elements.
inline bool aligned(int64_t features, int vector, std::initializer_list<const void*> tensors) {
  return features % vector == 0 && std::all_of(tensors.begin(), tensors.end(),
                                               [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; });
}

// Without y it computes the statistics alone.
Status launch_forward(const Forward& f, const CudaPlace& place);
Status launch_columns(const Backward& b, const CudaPlace& place);
Status prepare_columns();
Status prepare_cell();

}  // namespace blocksparse::norm
