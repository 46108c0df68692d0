#include <algorithm>
#include <numeric>

#include "blocksparse/graphs.h"
#include "core/random.h"
#include "graphs/checks.h"
#include "graphs/place_set.h"

namespace blocksparse::graphs {

namespace {

// Of so many blocks, 16 tries to swap each take seconds, then minutes, because every one waits for memory. The first
// number is of old layouts, which stay as they are.
constexpr int64_t kManyBlocks = int64_t{1} << 24, kManyBlocksWithDiagonal = int64_t{1} << 18;

// Each column as often as it is to be had, in random order, the next `degree` of them for each row. Of columns that a
// row would then have twice, one is swapped with a block of another row. A row has its diagonal block, if asked for,
// besides.
BlockCoordinates shuffled(int64_t out_blocks, int64_t in_blocks, int64_t degree, int64_t seed, bool diagonal) {
  Random rng(static_cast<uint64_t>(seed));
  const int64_t blocks = out_blocks * degree;
  std::vector<int32_t> column_name(static_cast<size_t>(in_blocks)), row_of_column(static_cast<size_t>(in_blocks), -1);
  std::iota(column_name.begin(), column_name.end(), 0);
  rng.shuffle(column_name);
  BlockCoordinates c{.out_blocks = out_blocks,
                     .in_blocks = in_blocks,
                     .out = std::vector<int32_t>(static_cast<size_t>(blocks)),
                     .in = std::vector<int32_t>(static_cast<size_t>(blocks))};
  for (int64_t i = 0; i < blocks; ++i) {
    c.out[static_cast<size_t>(i)] = static_cast<int32_t>(i / degree);
    c.in[static_cast<size_t>(i)] = column_name[static_cast<size_t>(i % in_blocks)];
  }
  rng.shuffle(c.in);
  auto has = [&](int32_t row, int32_t column) {
    const auto first = c.in.begin() + row * degree;
    return (diagonal && row == column) || std::find(first, first + degree, column) != first + degree;
  };
  std::vector<size_t> twice;
  for (int32_t row = 0; row < out_blocks; ++row) {
    twice.clear();
    if (diagonal) row_of_column[static_cast<size_t>(row)] = row;
    for (int64_t i = row * degree; i < (row + 1) * degree; ++i) {
      int32_t& last_row = row_of_column[static_cast<size_t>(c.in[static_cast<size_t>(i)])];
      if (last_row == row) twice.push_back(static_cast<size_t>(i));
      last_row = row;
    }
    for (const size_t mine : twice) {
      auto other = static_cast<size_t>(rng.below(blocks));
      while (c.out[other] == row || row_of_column[static_cast<size_t>(c.in[other])] == row ||
             has(c.out[other], c.in[mine])) {
        other = static_cast<size_t>(rng.below(blocks));
      }
      std::swap(c.in[mine], c.in[other]);
      row_of_column[static_cast<size_t>(c.in[mine])] = row;
    }
  }
  for (int32_t row = 0; diagonal && row < out_blocks; ++row) {
    c.out.push_back(row);
    c.in.push_back(row);
  }
  return c;
}

}  // namespace

Result<BlockCoordinates> balanced_random(int64_t out_blocks, int64_t in_blocks, int64_t degree, int64_t seed,
                                         bool diagonal) {
  BS_RETURN_IF_ERROR(check_nodes("balanced", out_blocks));
  BS_RETURN_IF_ERROR(check_nodes("balanced", in_blocks));
  BS_RETURN_IF_ERROR(check_seed("balanced", seed));
  if (degree < 0 || degree > in_blocks) {
    return invalid("[balanced] degree is ", degree, ", needs 0 to ", in_blocks, ", the blocks in a row");
  }
  BS_RETURN_IF_ERROR(check_blocks("balanced", static_cast<double>(out_blocks) * static_cast<double>(degree)));

  if (diagonal && (out_blocks != in_blocks || degree < 1)) {
    return invalid("[balanced] ", out_blocks, " x ", in_blocks, " blocks, degree ", degree,
                   ": a diagonal needs as many rows as columns, and 1 block or more in a row");
  }
  if (out_blocks * degree > (diagonal ? kManyBlocksWithDiagonal : kManyBlocks) && degree <= in_blocks / 4) {
    return shuffled(out_blocks, in_blocks, diagonal ? degree - 1 : degree, seed, diagonal);
  }

  // Row r takes the next `degree` columns, going round: distinct within a row, and column counts differ by one at most.
  // With a diagonal row r begins at column r, and both have one name.
  Random rng(static_cast<uint64_t>(seed));
  std::vector<int32_t> row_name(static_cast<size_t>(out_blocks)), column_name(static_cast<size_t>(in_blocks));
  std::iota(row_name.begin(), row_name.end(), 0);
  std::iota(column_name.begin(), column_name.end(), 0);
  rng.shuffle(row_name);
  if (diagonal) column_name = row_name;
  else rng.shuffle(column_name);
  BlockCoordinates c{.out_blocks = out_blocks, .in_blocks = in_blocks, .out = {}, .in = {}};
  PlaceSet places(out_blocks * degree);
  auto place = [in_blocks](int64_t row, int64_t column) { return static_cast<uint64_t>(row * in_blocks + column); };
  for (int64_t i = 0; i < out_blocks * degree; ++i) {
    const int64_t column = diagonal ? i / degree + i % degree : i;
    c.out.push_back(row_name[static_cast<size_t>(i / degree)]);
    c.in.push_back(column_name[static_cast<size_t>(column % in_blocks)]);
    places.insert(place(c.out.back(), c.in.back()));
  }

  // Swapping the columns of two blocks keeps every degree.
  const auto blocks = static_cast<int64_t>(c.out.size());
  for (int64_t tries = 16 * blocks; tries > 0; --tries) {
    const auto a = static_cast<size_t>(rng.below(blocks)), b = static_cast<size_t>(rng.below(blocks));
    if (diagonal && (c.out[a] == c.in[a] || c.out[b] == c.in[b])) continue;
    const uint64_t new_a = place(c.out[a], c.in[b]), new_b = place(c.out[b], c.in[a]);
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
