#include "core/random.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "blocksparse/graphs.h"
#include "graphs/checks.h"
#include "graphs/place_set.h"

namespace blocksparse::graphs {

Result<BlockCoordinates> random(int64_t out_blocks, int64_t in_blocks, double density, int64_t seed) {
  BS_RETURN_IF_ERROR(check_nodes("random", out_blocks));
  BS_RETURN_IF_ERROR(check_nodes("random", in_blocks));
  BS_RETURN_IF_ERROR(check_probability("random", "density", density));
  BS_RETURN_IF_ERROR(check_seed("random", seed));
  const double wanted = density * static_cast<double>(out_blocks) * static_cast<double>(in_blocks);
  BS_RETURN_IF_ERROR(check_blocks("random", wanted));
  const int64_t all = out_blocks * in_blocks;
  const auto count = static_cast<int64_t>(std::floor(wanted + 0.5));

  // Floyd's sampling (Bentley and Floyd, CACM 30:754, 1987) of the smaller of the set and its complement.
  const bool complement = count > all / 2;
  const int64_t draws = complement ? all - count : count;
  Random rng(static_cast<uint64_t>(seed));
  PlaceSet chosen(draws);
  // Drawn ahead, so that their cells are there when they are asked for.
  std::array<uint64_t, 16> drawn;
  const auto ahead = static_cast<int64_t>(drawn.size());
  const auto draw = [&](int64_t last) {
    if (last >= all) return;
    const auto place = static_cast<uint64_t>(rng.below(last + 1));
    drawn[static_cast<size_t>(last % ahead)] = place;
    chosen.prefetch(place);
  };
  for (int64_t last = all - draws; last < all - draws + ahead; ++last) draw(last);
  for (int64_t last = all - draws; last < all; ++last) {
    const uint64_t place = drawn[static_cast<size_t>(last % ahead)];
    draw(last + ahead);
    if (!chosen.insert(place)) chosen.insert(static_cast<uint64_t>(last));
  }

  BlockCoordinates c{.out_blocks = out_blocks, .in_blocks = in_blocks, .out = {}, .in = {}};
  c.out.reserve(static_cast<size_t>(count));
  c.in.reserve(static_cast<size_t>(count));
  auto add = [&](int64_t place) {
    c.out.push_back(static_cast<int32_t>(place / in_blocks));
    c.in.push_back(static_cast<int32_t>(place % in_blocks));
  };
  if (complement) {
    for (int64_t place = 0; place < all; ++place) {
      if (!chosen.contains(static_cast<uint64_t>(place))) add(place);
    }
  } else {
    chosen.for_each([&](uint64_t place) { add(static_cast<int64_t>(place)); });
  }
  return c;
}

}  // namespace blocksparse::graphs
