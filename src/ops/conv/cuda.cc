// The convolution on a card.
#include "ops/conv/conv.h"

namespace blocksparse::conv {

namespace {

Status missing() { return {StatusCode::unavailable, "[conv] there are no CUDA kernels for it yet"}; }

}  // namespace

Status cuda_product(const Product&, Workspace, Stream) { return missing(); }
Status cuda_weight_gradient(const WeightGradient&, Workspace, Stream) { return missing(); }
size_t cuda_workspace_size(const Product&) { return 0; }
size_t cuda_workspace_size(const WeightGradient&) { return 0; }

}  // namespace blocksparse::conv
