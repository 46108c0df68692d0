#include "ops/linear/select_cuda.h"

#include <algorithm>

#include "core/index.h"

namespace blocksparse::linear {

std::string_view name_of(CudaKernel kernel) {
  switch (kernel) {
    case CudaKernel::generic: return "generic";
  }
  return "unknown";
}

std::optional<CudaKernel> parse_cuda_kernel(std::string_view name) {
  for (CudaKernel kernel : kAllCudaKernels) {
    if (name == name_of(kernel)) return kernel;
  }
  return std::nullopt;
}

CudaProblem cuda_problem(Pass pass, const LayoutView& layout, DType dtype, int64_t n) {
  CudaProblem p{.pass = pass,
                .dtype = dtype,
                .block = layout.block_size,
                .n = n,
                .inputs = layout.in_features,
                .outputs = layout.out_features,
                .blocks = layout.blocks};
  if (pass == Pass::wgrad) return p;
  p.by_in = layout.transposed != (pass == Pass::dgrad);
  if (p.by_in) std::swap(p.inputs, p.outputs);
  const bool cut = p.by_in ? layout.cut_by_in : layout.cut_by_out;
  p.slots = cut ? most_slots(p.output_blocks(), p.input_blocks(), p.blocks) : 0;
  return p;
}

bool cuda_supports(CudaKernel kernel, const CudaProblem&, const cuda::Card& card) {
  switch (kernel) {
    case CudaKernel::generic: return card.arch >= cuda::kOldestArch;
  }
  return false;
}

CudaKernel choose_cuda_kernel(const CudaProblem& p, const cuda::Card& card) {
  for (auto kernel = kAllCudaKernels.rbegin(); kernel != kAllCudaKernels.rend(); ++kernel) {
    if (cuda_supports(*kernel, p, card)) return *kernel;
  }
  return CudaKernel::generic;
}

// From 1024 tokens on there are 16 tiles of tokens to every row: enough work to hide a long one that starts first, and
// the workspace stays small.
bool generic_splits(const CudaProblem& p) { return p.slots > 0 && p.n < 1024; }

size_t cuda_workspace_bytes(const CudaProblem& p) {
  if (p.pass == Pass::wgrad) {
    return static_cast<size_t>(p.n > kTermsByValue ? std::min(p.n, kMostTerms) * kTermBytes : 0);
  }
  if (!generic_splits(p)) return 0;
  return static_cast<size_t>(p.slots * p.n * p.block * size_of(sum_dtype(p.dtype)));
}

}  // namespace blocksparse::linear
