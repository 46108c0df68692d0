#include "gemm/product.h"

#include <algorithm>

#include "core/checks.h"
#include "gemm/cpu/plan.h"

namespace blocksparse::gemm {

std::string_view name_of(Pass pass) {
  switch (pass) {
    case Pass::fprop: return "fprop";
    case Pass::dgrad: return "dgrad";
    case Pass::wgrad: return "wgrad";
  }
  return "unknown";
}

Activations flatten(const ConstTensor& tensor) {
  const auto m =
      check_activations({"linear", "x", tensor}, tensor.shape[static_cast<size_t>(tensor.rank) - 1], Use::read);
  return {tensor.data, m->n, m->features, m->token_stride, m->feature_stride};
}

GradTerm WeightGradient::term(size_t i) const {
  const GradPair& pair = pairs[i];
  return exchanged ? GradTerm{flatten(pair.dy), flatten(pair.x)} : GradTerm{flatten(pair.x), flatten(pair.dy)};
}

size_t workspace_size(Pass pass, const LayoutView& layout, DType dtype, int64_t n, Device device) {
  if (n <= 0 || layout.index == nullptr) return 0;
  constexpr int64_t kMostTokens = int64_t{1} << 40;  // more do not fit into any memory
  n = std::min(n, kMostTokens);
  if (device.type == DeviceType::cuda) return cuda_workspace_size(pass, layout, dtype, n);
  if (pass == Pass::wgrad) {
    return cpu_workspace_bytes(CpuGradientProblem{.dtype = dtype,
                                                  .dw_dtype = dtype,  // which needs the most
                                                  .block = layout.block_size,
                                                  .n = n,
                                                  .inputs = layout.in_features,
                                                  .outputs = layout.out_features,
                                                  .blocks = layout.blocks});
  }
  const bool by_in = layout.transposed != (pass == Pass::dgrad);
  return cpu_workspace_bytes(CpuProblem{.dtype = dtype,
                                        .block = layout.block_size,
                                        .n = n,
                                        .inputs = by_in ? layout.out_features : layout.in_features,
                                        .outputs = by_in ? layout.in_features : layout.out_features,
                                        .slots = walk_of(layout, by_in).slots});
}

// A block of 8 holds eight features of the gate or eight of up, never both.
bool fuses_glu(const LayoutView& layout, DType dtype, int64_t n, Device device) {
  if (layout.block_size < 16) return false;
  return device.type != DeviceType::cuda || cuda_fuses_glu(layout, dtype, n);
}

size_t glu_workspace_size(const LayoutView& layout, DType dtype, int64_t n, Device device) {
  if (n <= 0 || layout.index == nullptr) return 0;
  if (device.type == DeviceType::cuda) return cuda_glu_workspace_size(layout, dtype, n);
  return workspace_size(Pass::fprop, layout, dtype, n, device);
}

}  // namespace blocksparse::gemm
