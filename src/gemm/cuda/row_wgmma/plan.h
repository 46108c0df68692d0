// The family `row_wgmma`: rows of blocks times 64 to 256 tokens. All functions are pure functions of sizes and card.
#pragma once

#include <cstdint>

#include "gemm/cuda/problem.h"

namespace blocksparse::gemm::row_wgmma {

// The functions of the family's row: see families.h.
bool supports(const CudaProblem& p);
int64_t least_tokens(const CudaProblem& p);
bool pays(const CudaProblem& p, const cuda::Card& card);
int64_t workspace_bytes(const CudaProblem& p);

// The tokens of a job: 64, 128 or 256.
int32_t tokens_of_tile(const CudaProblem& p, const cuda::Card& card);

// Tokens that one launch takes; more are done by one launch after the other.
int64_t tokens_of_launch(const CudaProblem& p);

// Whether the slices of a cut row are jobs of their own, whose sums a second kernel adds. Otherwise rows are walked
// whole.
bool adds_slices(const CudaProblem& p);

// Whether there are kernels for jobs that were dealt, of such blocks and tiles.
constexpr bool may_be_dealt(int64_t block, int64_t tokens) { return block == 64 || (block == 32 && tokens >= 128); }

// Whether thread blocks take whole rows as they were dealt when the layout moved to the card.
bool is_dealt(const CudaProblem& p, int64_t tokens, const cuda::Card& card);

// Whether neighbouring jobs are the rows of one tile of tokens, as pays if x is larger than L2. Otherwise they are the
// tiles of one row. ba(288,3,blocks=2448), b = 64, H100: 1024 tokens 81 us instead of 87, 2048 tokens 164 instead of
// 237; rows of about equal length, 1024 tokens: 79 us instead of 77.
bool takes_rows_inside(const CudaProblem& p);

// The most rows that can be cut.
int64_t most_splits(const CudaProblem& p);

}  // namespace blocksparse::gemm::row_wgmma
