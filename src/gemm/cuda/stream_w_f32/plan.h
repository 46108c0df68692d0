// The family `stream_w_f32`: `stream_w` for f32 by fused multiply-add, with stream_w's plan.
#pragma once

#include "gemm/cuda/stream_w/plan.h"

namespace blocksparse::gemm::stream_w_f32 {

// The functions of the family's row: see families.h.
bool supports(const CudaProblem& p);
int64_t least_tokens(const CudaProblem& p);
bool pays(const CudaProblem& p, const cuda::Card& card);
int64_t workspace_bytes(const CudaProblem& p);

}  // namespace blocksparse::gemm::stream_w_f32
