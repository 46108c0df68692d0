// The gradient of a bias inside: a call that is checked, and how a card divides it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "blocksparse/bias.h"
#include "core/ceil_div.h"

namespace blocksparse::bias {

// dbias[f] = sum over t of dy[t, f]; features lie side by side.
struct Gradient {
  DType dtype = DType::f32;
  int64_t n = 0, features = 0, token_stride = 0;
  const void* dy = nullptr;
  void* dbias = nullptr;
};

// On a card a thread block sums some tokens of a strip of features. A second kernel adds these parts, in their order.
inline constexpr int32_t kThreads = 256, kLanes = 32;
inline constexpr int64_t kTokensOfThread = 8;  // at least, where there are several parts
inline constexpr int64_t kMostBlocks = 264;    // two for each of 132 SMs

struct Plan {
  int32_t lanes;       // threads side by side, each with a vector of features
  int64_t strips;      // of features
  int64_t parts;       // of the tokens
  int64_t part_bytes;  // workspace, if there are several parts
};

// Vectors of `vector` features.
constexpr Plan plan_of(int64_t n, int64_t features, int32_t vector, int64_t sum_bytes) {
  Plan plan{1, 1, 1, 0};
  const int64_t vectors = ceil_div(features, int64_t{vector});
  while (plan.lanes < std::min<int64_t>(kLanes, vectors)) plan.lanes *= 2;
  plan.strips = std::max<int64_t>(1, ceil_div(vectors, int64_t{plan.lanes}));
  const int64_t worth = n / (kTokensOfThread * (kThreads / plan.lanes));
  plan.parts = std::clamp<int64_t>(worth, 1, std::max<int64_t>(1, kMostBlocks / plan.strips));
  plan.part_bytes = plan.parts > 1 ? plan.parts * features * sum_bytes : 0;
  return plan;
}

// The CUDA path. A build without it returns `unavailable`.
Status cuda_gradient(const Gradient& g, Workspace workspace, Device device, Stream stream);
Status prepare_cuda(Device device);

}  // namespace blocksparse::bias
