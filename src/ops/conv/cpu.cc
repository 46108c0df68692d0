// Drives the convolution on the CPU.
#include "ops/conv/conv.h"

namespace blocksparse::conv {

Status cpu_product(const Product& p, Isa, Workspace, int32_t) {
  reference_product(p);
  return {};
}

Status cpu_weight_gradient(const WeightGradient& g, Isa, Workspace, int32_t) {
  reference_weight_gradient(g);
  return {};
}

size_t cpu_workspace_size(const Product&) { return 0; }
size_t cpu_workspace_size(const WeightGradient&) { return 0; }

}  // namespace blocksparse::conv
