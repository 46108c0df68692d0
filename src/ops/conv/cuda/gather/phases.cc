#include "ops/conv/cuda/gather/phases.h"

#include <algorithm>
#include <numeric>

#include "core/ceil_div.h"
#include "ops/conv/cuda/select.h"

namespace blocksparse::conv {

namespace {

struct PhaseAxis {
  int64_t start = 0, step = 1, taps = 0;  // of the filter
  int64_t first = 0, dilation = 1;        // the pixel of x for the first position, at the first tap that is gathered
};

// The taps t for which the stride divides (rest + padding - t * dilation), and the pixels that they lead to.
PhaseAxis inverse_axis(const Gather& g, size_t a, int64_t rest) {
  const int64_t stride = g.stride[a], dilation = g.dilation[a], common = std::gcd(stride, dilation);
  PhaseAxis axis{.start = 0, .step = stride / common, .taps = 0, .first = 0, .dilation = dilation / common};
  while (axis.start < std::min(axis.step, g.kernel[a]) && (rest + g.padding[a] - axis.start * dilation) % stride != 0) {
    ++axis.start;
  }
  if (axis.start >= std::min(axis.step, g.kernel[a])) return axis;
  axis.taps = ceil_div(g.kernel[a] - axis.start, axis.step);
  const int64_t of_start = (rest + g.padding[a] - axis.start * dilation) / stride;
  axis.first = of_start - (axis.taps - 1) * axis.dilation;
  return axis;
}

}  // namespace

int64_t phase_count(const Gather& g) {
  constexpr int64_t kMany = int64_t{1} << 20;  // strides may be large, and their product must not overflow
  int64_t count = 1;
  for (int64_t stride : g.stride) count *= g.inverse ? std::min(stride, kMany) : 1;
  return count;
}

Phase phase_of(const Gather& g, const Images& x, const Images& y, int32_t block, int64_t index) {
  Phase p;
  p.x.data = x.data;
  p.x.n = p.y.n = x.n;
  p.x.channels = x.channels;
  p.x.inputs_of_tap = inputs_of_tap(x.channels, block);
  p.y.data = y.data;
  p.y.channels = y.channels;
  p.taps.mirrored = g.inverse;
  for (size_t a = 3; a-- > 0;) {
    const size_t to = 2 - a;  // width first
    int64_t rest = 0;
    PhaseAxis axis{.start = 0, .step = 1, .taps = g.kernel[a], .first = -g.padding[a], .dilation = g.dilation[a]};
    if (g.inverse) {
      rest = index % g.stride[a];
      index /= g.stride[a];
      axis = inverse_axis(g, a, rest);
    }
    p.taps.start[a] = static_cast<int32_t>(axis.start);
    p.taps.step[a] = static_cast<int32_t>(axis.step);
    p.taps.count[a] = static_cast<int32_t>(axis.taps);
    const int64_t step_of_y = g.inverse ? g.stride[a] : 1;
    p.x.size[to] = x.size[a];
    p.x.taps[to] = std::max<int64_t>(1, axis.taps);
    p.x.first[to] = static_cast<int32_t>(axis.first);
    p.x.stride[to] = static_cast<int32_t>(g.inverse ? 1 : g.stride[a]);
    p.x.dilation[to] = static_cast<int32_t>(axis.dilation);
    p.x.positions[to] = p.y.positions[to] = std::max<int64_t>(0, ceil_div(y.size[a] - rest, step_of_y));
    p.y.size[to] = y.size[a];
    p.y.first[to] = static_cast<int32_t>(rest);
    p.y.stride[to] = static_cast<int32_t>(step_of_y);
  }
  return p;
}

bool can_walk(const Phase& p) {
  const bool deep = p.x.deep() || p.y.size[2] != 1;
  const int64_t corner = deep ? 16 : 128, most_reach = deep ? 31 : 255;
  constexpr int64_t kMostStride = 8;
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t first = p.x.first[axis];
    const int64_t last = first + (p.x.positions[axis] - 1) * p.x.stride[axis] + 1 - p.x.size[axis];
    if (first < -corner || first >= corner || last < -corner || last >= corner) return false;
    if ((p.x.taps[axis] - 1) * p.x.dilation[axis] > most_reach) return false;
    if (p.x.stride[axis] > kMostStride || p.y.stride[axis] > kMostStride) return false;
  }
  return true;
}

}  // namespace blocksparse::conv
