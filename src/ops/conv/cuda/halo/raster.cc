#include "ops/conv/cuda/halo/raster.h"

#include <algorithm>

namespace blocksparse::conv {

namespace {

// The columns (or rows) of an image in the raster. Everything that is read from `size` on is zero, and lies in front of
// the next image's first pixel.
int64_t raster_side(const gemm::GatheredImages& x, int axis) {
  const int64_t before = -int64_t{x.first[axis]}, size = x.size[axis];
  const int64_t last = x.positions[axis] - 1 + (x.taps[axis] - 1) * x.dilation[axis] - before;
  return std::max({x.positions[axis], size + before, last + 1, before});
}

}  // namespace

std::optional<Raster> raster_of(const Phase& phase) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1024, kMostCorner = 128;  // a tile may end beyond the last position
  const gemm::GatheredImages& x = phase.x;
  if (x.deep() || phase.y.size[2] != 1 || !can_walk(phase)) return std::nullopt;
  int64_t side[2];
  for (int axis = 0; axis < 2; ++axis) {
    if (x.stride[axis] != 1 || phase.y.stride[axis] != 1 || phase.y.size[axis] != x.positions[axis])
      return std::nullopt;
    side[axis] = raster_side(x, axis);
    if (x.first[axis] + side[axis] - x.size[axis] >= kMostCorner || side[axis] - x.positions[axis] >= kMostCorner) {
      return std::nullopt;
    }
  }
  const int64_t positions = x.n * side[0] * side[1];
  const int64_t reach = (x.taps[1] - 1) * x.dilation[1] * side[0] + (x.taps[0] - 1) * x.dilation[0];
  if (positions + reach >= kMost) return std::nullopt;
  return Raster{.width = static_cast<int32_t>(side[0]),
                .height = static_cast<int32_t>(side[1]),
                .positions = positions,
                .row_step = static_cast<int32_t>(x.dilation[1] * side[0]),
                .column_step = x.dilation[0],
                .reach = static_cast<int32_t>(reach)};
}

gemm::GatheredImages in_raster(const gemm::GatheredImages& x, const Raster& raster) {
  gemm::GatheredImages to = x;
  to.positions[0] = raster.width;
  to.positions[1] = raster.height;
  return to;
}

gemm::GatheredImages in_raster(const Images& dy, const Phase& phase, const Raster& raster) {
  gemm::GatheredImages to;
  to.data = dy.data;
  to.n = dy.n;
  to.channels = dy.channels;
  for (int axis = 0; axis < 2; ++axis) to.size[axis] = phase.x.positions[axis];
  return in_raster(to, raster);
}

}  // namespace blocksparse::conv
