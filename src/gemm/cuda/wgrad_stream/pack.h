// Copies x and dy into mma's order for the gradient `wgrad_stream`. What is outside of them becomes 0. f32 is rounded
// to tf32 on the way.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "blocksparse/status.h"
#include "gemm/cuda/wgrad_stream/plan.h"

namespace blocksparse::gemm::wgrad_stream {

// A pair (x, dy). A stride is that of tokens, or of features if these come first; the other stride is 1.
struct Term {
  const void* data[2];  // x, dy
  int64_t stride[2];
  int32_t first, n;  // its tokens among those of a launch
  bool features_first[2];
  bool vectors[2];  // rows begin at multiples of 16 bytes

  static constexpr int kMost = 64;  // of a launch
};

// The terms lie one behind the other, in chunks of 32 tokens. Features lie in patches of U = min(b, 32), which are U /
// 8 groups of 8: to[patch][chunk][group][lane][4].
// - Lane (g, t) = (lane / 4, lane % 4) has one feature of group j: U / 4 * (g / 2) + 2 j + g % 2. So a lane of mma's
//   result has U / 4 neighbouring features.
// - Its four words are tokens 8 t to 8 t + 7 of that feature. So a word is a pair of tokens in any order of memory.
// - f32: chunks are 16 tokens, and the four words are tokens 4 t to 4 t + 3.
struct Pack {
  Term term[Term::kMost] = {};
  int32_t terms = 0;
  int64_t features[2] = {};
  int32_t patches[2] = {};
  void* to[2] = {};
  int32_t first_chunk = 0, chunks = 0, all_chunks = 0;  // of this launch, and of all
};

constexpr int chunk_tokens(int64_t element_size) { return static_cast<int>(64 / element_size); }

Status pack_operands(const Pack& p, int64_t element_size, int32_t patch, bool overlap, cudaStream_t stream);
Status prepare_pack();

}  // namespace blocksparse::gemm::wgrad_stream
