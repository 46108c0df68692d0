#include "gemm/cuda/generic/plan.h"

#include <algorithm>

namespace blocksparse::gemm::generic {

// A block of 8 holds eight features of the gate or eight of up, never both.
bool supports(const CudaProblem& p) { return !p.glu || p.block >= 16; }
int64_t least_tokens(const CudaProblem&) { return 0; }
bool pays(const CudaProblem&, const cuda::Card&) { return true; }

// Rows are cut only below 1024 tokens. From there on every row has 16 tiles of tokens, enough work to hide a long row
// that starts first, and the workspace stays small.
bool splits(const CudaProblem& p) { return p.slots > 0 && p.n < 1024; }

int64_t workspace_bytes(const CudaProblem& p) {
  if (p.pass == Pass::wgrad) return p.n > kTermsByValue ? std::min(p.n, kMostTerms) * kTermBytes : 0;
  return splits(p) ? p.slots * p.n * p.block * size_of(sum_dtype(p.dtype)) : 0;
}

}  // namespace blocksparse::gemm::generic
