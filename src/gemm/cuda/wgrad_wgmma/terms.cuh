// A list of (x, dy) as the kernel `wgrad_wgmma` sums it. The tokens of a pair follow those of the pair in front. Each
// pair is filled up to whole steps with zeros, which boxes bring from beyond its end.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include "gemm/cuda/wgrad_wgmma/plan.h"

namespace blocksparse::gemm::wgrad_wgmma {

template <int Most>
struct TermSteps {
  static constexpr int kMost = Most;
  int32_t terms;
  int32_t ends[Most];  // steps up to the end of each pair

  __host__ __device__ int32_t all() const { return terms == 0 ? 0 : ends[terms - 1]; }
};

// The pair and its token at a step; advance() goes to the next step.
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
