// What the CUDA kernel `tiled` takes (f32: more than 64 tokens, wgrad any), and what it lays down in the workspace.
// Pure functions, as in select_cuda.h.
#pragma once

#include "gemm/cuda/select.h"

namespace blocksparse::gemm {

bool tiled_supports(const CudaProblem& p);
// Not where there are too few tiles for the card.
bool tiled_pays(const CudaProblem& p, const cuda::Card& card);

inline constexpr int32_t kTiledOutputs = 128;  // fprop, dgrad: of a tile; tokens likewise
inline constexpr int32_t kTiledTokens = 128;

// Tiles of outputs.
int64_t tiled_groups(const CudaProblem& p);

// fprop and dgrad: where the lists begin, in bytes.
struct TiledPlaces {
  int64_t counts = 0, inputs = 0, weights = 0, end = 0;
};
TiledPlaces tiled_places(const CudaProblem& p);

// wgrad: blocks of one row of W that a thread block takes, and how many such runs there are at most.
int32_t tiled_run_blocks(int32_t block);
int64_t tiled_runs(const CudaProblem& p);

int64_t tiled_workspace_bytes(const CudaProblem& p);

}  // namespace blocksparse::gemm
