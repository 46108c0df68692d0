// A list of (x, dy) as the kernel `wgrad_wgmma` sums it: the tokens of one pair behind those of the other, each filled
// up to whole steps, with zeros that boxes beyond its end bring.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include "gemm/cuda/wgrad_wgmma/plan.h"

namespace blocksparse::gemm::wgrad_wgmma {

template <int Most>
struct TermSteps {
  static constexpr int kMost = Most;
  int32_t terms;
  int32_t ends[Most];  // steps of each and of those in front of it

  __host__ __device__ int32_t all() const { return terms == 0 ? 0 : ends[terms - 1]; }
};

// Which pair, and from which of its tokens on, one step after the other.
template <int Tokens>
struct StepPlace {
  int term = 0, token, left;  // steps of the pair

  template <int Most>
  __host__ __device__ StepPlace(const TermSteps<Most>& steps, int step) : token(step * Tokens) {
    if constexpr (Most > 1) {
      int begin = 0;
      while (term + 1 < steps.terms && step >= steps.ends[term]) begin = steps.ends[term++];
      token -= begin * Tokens;
    }
    left = steps.ends[term] - step;
  }

  template <int Most>
  __host__ __device__ void advance(const TermSteps<Most>& steps) {
    token += Tokens;
    if constexpr (Most > 1) {
      if (--left > 0 || term + 1 >= steps.terms) return;
      left = steps.ends[term + 1] - steps.ends[term];
      ++term, token = 0;
    }
  }
};

}  // namespace blocksparse::gemm::wgrad_wgmma
