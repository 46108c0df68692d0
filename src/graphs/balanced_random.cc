#include <algorithm>
#include <numeric>
#include <unordered_set>

#include "blocksparse/graphs.h"
#include "core/random.h"
#include "graphs/checks.h"

namespace blocksparse::graphs {

Result<BlockCoordinates> balanced_random(int64_t out_blocks, int64_t in_blocks, int64_t degree, int64_t seed) {
  BS_RETURN_IF_ERROR(check_nodes("balanced", out_blocks));
  BS_RETURN_IF_ERROR(check_nodes("balanced", in_blocks));
  BS_RETURN_IF_ERROR(check_seed("balanced", seed));
  if (degree < 0 || degree > in_blocks) {
    return invalid("[balanced] degree is ", degree, ", needs 0 to ", in_blocks, ", the blocks in a row");
  }
  BS_RETURN_IF_ERROR(check_blocks("balanced", static_cast<double>(out_blocks) * static_cast<double>(degree)));

  // Row r takes the next `degree` columns, cyclically. They are distinct within a row, and column counts differ by one
  // at most.
  Random rng(static_cast<uint64_t>(seed));
  std::vector<int32_t> row_name(static_cast<size_t>(out_blocks)), column_name(static_cast<size_t>(in_blocks));
  std::iota(row_name.begin(), row_name.end(), 0);
  std::iota(column_name.begin(), column_name.end(), 0);
  rng.shuffle(row_name);
  rng.shuffle(column_name);
  BlockCoordinates c{.out_blocks = out_blocks, .in_blocks = in_blocks, .out = {}, .in = {}};
  std::unordered_set<int64_t> places;
  auto place = [in_blocks](int64_t row, int64_t column) { return row * in_blocks + column; };
  for (int64_t i = 0; i < out_blocks * degree; ++i) {
    c.out.push_back(row_name[static_cast<size_t>(i / degree)]);
    c.in.push_back(column_name[static_cast<size_t>(i % in_blocks)]);
    places.insert(place(c.out.back(), c.in.back()));
  }

  // Swapping the columns of two blocks keeps every degree.
  const auto blocks = static_cast<int64_t>(c.out.size());
  for (int64_t tries = 16 * blocks; tries > 0; --tries) {
    const auto a = static_cast<size_t>(rng.below(blocks)), b = static_cast<size_t>(rng.below(blocks));
    const int64_t new_a = place(c.out[a], c.in[b]), new_b = place(c.out[b], c.in[a]);
    if (places.contains(new_a) || places.contains(new_b)) continue;  // refuses swaps within a row or a column as well
    places.erase(place(c.out[a], c.in[a]));
    places.erase(place(c.out[b], c.in[b]));
    places.insert(new_a);
    places.insert(new_b);
    std::swap(c.in[a], c.in[b]);
  }
  return c;
}

}  // namespace blocksparse::graphs
