#include "ops/norm/select_cuda.h"

#include <algorithm>

namespace blocksparse::norm {

namespace {

constexpr int64_t kResident = 2;  // thread blocks of an SM

int64_t divide_up(int64_t value, int64_t step) { return (value + step - 1) / step; }

WidePlan plan(int64_t vectors) {
  WidePlan p;
  p.cluster = 1;
  while (p.cluster < kMostCluster && vectors > int64_t{kBestWidth} * p.cluster) p.cluster *= 2;
  const int64_t per = divide_up(vectors, p.cluster), width = divide_up(per, 32) * 32;
  if (width > kWideThreads) return {};
  p.per = static_cast<int32_t>(per);
  p.width = static_cast<int32_t>(width);
  return p;
}

// As many groups as it takes that the tokens fit on the card at once.
void divide_tokens(WidePlan& p, int64_t n, int64_t clusters, int32_t tokens) {
  const int32_t most_threads = tokens == 8 ? kManyRowsThreads : kWideThreads;
  p.tokens = tokens;
  const int64_t wanted = divide_up(n, tokens * clusters);
  p.groups = static_cast<int32_t>(std::clamp<int64_t>(wanted, 1, most_threads / p.width));
  p.parts = divide_up(n, p.tokens_at_once());
}

int64_t resident_clusters(const WidePlan& p, int64_t groups, int32_t multiprocessors) {
  return std::max<int64_t>(1, kResident * (multiprocessors / p.cluster) / groups);
}

}  // namespace

WidePlan plan_wide_forward(int64_t n, int64_t groups, int64_t vectors, int32_t multiprocessors) {
  WidePlan p = plan(vectors);
  if (!p.fits()) return p;
  const int64_t clusters = resident_clusters(p, groups, multiprocessors);
  divide_tokens(p, n, clusters, 4);
  if (p.parts > clusters && p.width <= kManyRowsThreads) divide_tokens(p, n, clusters, 8);
  return p;
}

WidePlan plan_wide_cell(int64_t n, int64_t vectors, int32_t multiprocessors) {
  WidePlan p = plan(vectors);
  if (!p.fits()) return p;
  const int64_t clusters = resident_clusters(p, 1, multiprocessors);
  divide_tokens(p, n, clusters, 2);
  p.parts = std::min(p.parts, clusters);
  return p;
}

}  // namespace blocksparse::norm
