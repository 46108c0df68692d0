// Patterns without randomness: dense, block-diagonal, banded, butterfly.
#include <algorithm>
#include <bit>

#include "blocksparse/graphs.h"
#include "graphs/checks.h"

namespace blocksparse::graphs {

Result<BlockCoordinates> dense(int64_t out_blocks, int64_t in_blocks) {
  BS_RETURN_IF_ERROR(check_nodes("dense", out_blocks));
  BS_RETURN_IF_ERROR(check_nodes("dense", in_blocks));
  BS_RETURN_IF_ERROR(check_blocks("dense", static_cast<double>(out_blocks) * static_cast<double>(in_blocks)));
  BlockCoordinates c{.out_blocks = out_blocks, .in_blocks = in_blocks, .out = {}, .in = {}};
  for (int32_t out = 0; out < out_blocks; ++out) {
    for (int32_t in = 0; in < in_blocks; ++in) {
      c.out.push_back(out);
      c.in.push_back(in);
    }
  }
  return c;
}

Result<BlockCoordinates> block_diagonal(int64_t nodes, int64_t group) {
  BS_RETURN_IF_ERROR(check_nodes("diagonal", nodes));
  if (group < 1 || group > nodes) return invalid("[diagonal] group is ", group, ", needs 1 to ", nodes);
  BS_RETURN_IF_ERROR(check_blocks("diagonal", static_cast<double>(nodes) * static_cast<double>(group)));
  BlockCoordinates c{.out_blocks = nodes, .in_blocks = nodes, .out = {}, .in = {}};
  for (int64_t out = 0; out < nodes; ++out) {
    const int64_t first = out / group * group;
    for (int64_t in = first; in < std::min(first + group, nodes); ++in) {
      c.out.push_back(static_cast<int32_t>(out));
      c.in.push_back(static_cast<int32_t>(in));
    }
  }
  return c;
}

Result<BlockCoordinates> banded(int64_t nodes, int64_t width) {
  BS_RETURN_IF_ERROR(check_nodes("banded", nodes));
  if (width < 0 || width >= nodes) return invalid("[banded] width is ", width, ", needs 0 to ", nodes - 1);
  BS_RETURN_IF_ERROR(check_blocks("banded", static_cast<double>(nodes) * (2.0 * static_cast<double>(width) + 1)));
  BlockCoordinates c{.out_blocks = nodes, .in_blocks = nodes, .out = {}, .in = {}};
  for (int64_t out = 0; out < nodes; ++out) {
    for (int64_t in = std::max<int64_t>(0, out - width); in <= std::min(nodes - 1, out + width); ++in) {
      c.out.push_back(static_cast<int32_t>(out));
      c.in.push_back(static_cast<int32_t>(in));
    }
  }
  return c;
}

Result<BlockCoordinates> butterfly(int64_t nodes) {
  BS_RETURN_IF_ERROR(check_nodes("butterfly", nodes));
  if ((nodes & (nodes - 1)) != 0) return invalid("[butterfly] ", nodes, " blocks per side, needs a power of two");
  const int in_a_row = std::bit_width(static_cast<uint64_t>(nodes));  // the diagonal's, and one for each bit
  BS_RETURN_IF_ERROR(check_blocks("butterfly", static_cast<double>(nodes) * in_a_row));
  BlockCoordinates c{.out_blocks = nodes, .in_blocks = nodes, .out = {}, .in = {}};
  for (int64_t out = 0; out < nodes; ++out) {
    c.out.push_back(static_cast<int32_t>(out));
    c.in.push_back(static_cast<int32_t>(out));
    for (int64_t bit = 1; bit < nodes; bit *= 2) {
      c.out.push_back(static_cast<int32_t>(out));
      c.in.push_back(static_cast<int32_t>(out ^ bit));
    }
  }
  return c;
}

}  // namespace blocksparse::graphs
