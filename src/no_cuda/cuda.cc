// The CUDA entry points in a build without CUDA: each says so.
#include "blocksparse/blocksparse.h"
#include "ops/linear/linear.h"

namespace blocksparse {

Status cuda_status() {
  return {StatusCode::unavailable,
          "[cuda] this library was built without CUDA; build it with nvcc and -DBLOCKSPARSE_CUDA=ON"};
}

namespace linear {

Status cuda_product(const Product&, Workspace, Stream) { return cuda_status(); }
Status cuda_weight_gradient(const WeightGradient&, Workspace, Stream) { return cuda_status(); }
size_t cuda_workspace_size(Pass, const LayoutView&, DType, int64_t) { return 0; }

}  // namespace linear

}  // namespace blocksparse
