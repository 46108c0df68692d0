#include "gemm/cuda/stream_w_f32/plan.h"

#include <algorithm>

namespace blocksparse::gemm::stream_w_f32 {

// For the limits on offsets see stream_w.
bool supports(const CudaProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 36;
  return p.dtype == DType::f32 && !p.tf32 && !p.glu && p.pass != Pass::wgrad && p.n >= 1 && p.n <= stream_w::kTokens &&
         p.w_aligned && p.blocks * p.block * p.block < kMost && p.inputs * stream_w::kTokens < kMost / 2 &&
         p.outputs * stream_w::kMostTokens < kMost / 2;
}

int64_t least_tokens(const CudaProblem&) { return 1; }
bool pays(const CudaProblem&, const cuda::Card&) { return true; }

int64_t workspace_bytes(const CudaProblem& asked) {
  CudaProblem p = asked;
  p.tf32 = false;
  p.n = std::min(p.n, stream_w::kTokens);
  if (!supports(p)) return 0;
  const stream_w::WorkspaceParts parts = stream_w::workspace_parts(p);
  return parts.partial_bytes + parts.packed_bytes;
}

}  // namespace blocksparse::gemm::stream_w_f32
