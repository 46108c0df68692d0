#include "ops/norm/cuda/plan.h"

#include <algorithm>

#include "core/ceil_div.h"

namespace blocksparse::norm {

namespace {

constexpr int64_t kResident = 2;  // thread blocks of an SM

WidePlan plan(int64_t vectors, int64_t best_width) {
  WidePlan p;
  p.cluster = 1;
  while (p.cluster < kMostCluster && vectors > best_width * p.cluster) p.cluster *= 2;
  const int64_t per = ceil_div(vectors, p.cluster), width = round_up(per, 32);
  if (width > kWideThreads) return {};
  p.per = static_cast<int32_t>(per);
  p.width = static_cast<int32_t>(width);
  return p;
}

// As many groups as it takes that the tokens fit on the card at once.
void divide_tokens(WidePlan& p, int64_t n, int64_t clusters, int32_t tokens) {
  const int32_t most_threads = tokens == 8 ? kManyRowsThreads : kWideThreads;
  p.tokens = tokens;
  const int64_t wanted = ceil_div(n, tokens * clusters);
  p.groups = static_cast<int32_t>(std::clamp<int64_t>(wanted, 1, most_threads / p.width));
  p.parts = ceil_div(n, p.tokens_at_once());
}

int64_t resident_clusters(const WidePlan& p, int64_t groups, int32_t multiprocessors) {
  return std::max<int64_t>(1, kResident * (multiprocessors / p.cluster) / groups);
}

// Clusters of more lie within a GPC, whose multiprocessors they do not always use up: an H200 has places for 14 of 8.
int64_t certain_clusters(const WidePlan& p, int32_t multiprocessors) {
  const int64_t used = p.cluster <= 2 ? multiprocessors : int64_t{multiprocessors} * 9 / 10;
  return std::max<int64_t>(1, kResident * (used / p.cluster));
}

}  // namespace

WidePlan plan_wide_forward(int64_t n, int64_t groups, int64_t vectors, int32_t multiprocessors) {
  WidePlan p = plan(vectors, kBestWidth);
  if (!p.fits()) return p;
  const int64_t clusters = resident_clusters(p, groups, multiprocessors);
  divide_tokens(p, n, clusters, 4);
  if (p.parts > clusters && p.width <= kManyRowsThreads) divide_tokens(p, n, clusters, 8);
  return p;
}

WidePlan plan_wide_cell(int64_t n, int64_t vectors, int32_t multiprocessors) {
  WidePlan p = plan(vectors, kBestCellWidth);
  if (!p.fits()) return p;
  const int64_t clusters = certain_clusters(p, multiprocessors);
  divide_tokens(p, n, clusters, 2);
  // 18432 features, us a step: 457 with 28 clusters, 466 with 30, 487 with 32, 468 with 64.
  p.parts = std::min(p.parts, clusters);
  return p;
}

}  // namespace blocksparse::norm
