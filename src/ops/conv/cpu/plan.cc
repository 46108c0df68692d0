#include "ops/conv/cpu/plan.h"

#include <algorithm>
#include <numeric>

#include "core/ceil_div.h"

namespace blocksparse::conv {

namespace {

constexpr int64_t kRoundBytes = 4 << 20;    // of packed images, which stay in the last-level cache
constexpr int64_t kCacheBytes = 512 << 10;  // of both operands of wgrad, which stay in L2 if few rows are packed twice
                                            // for it
constexpr int64_t kSumBytes = 16 << 20;     // of sums of dW in f32, if there are several rounds
constexpr double kMostWaste = 4;            // see waste()
constexpr int64_t kWeightBytes = 24 << 20;  // of W in the order of use; a larger W is copied chunk by chunk
constexpr size_t kAlignment = 64;
constexpr int kAreas = 6;  // of the workspace

int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -ceil_div(-a, b); }

AxisPlan plan_axis(const Gather& g, const Images& x, const Images& y, size_t i) {
  AxisPlan a{.inverse = g.inverse,
             .kernel = g.kernel[i],
             .stride = g.stride[i],
             .dilation = g.dilation[i],
             .padding = g.padding[i],
             .in_size = x.size[i],
             .out_size = y.size[i]};
  const int64_t last = (a.kernel - 1) * a.dilation;
  if (a.inverse) {
    a.low = floor_div(a.padding - last, a.stride);
    a.high = floor_div(a.padding + a.stride - 1, a.stride);
  } else {
    a.low = floor_div(-a.padding, a.stride);
    a.high = floor_div(last - a.padding, a.stride);
    a.phases = std::min(a.kernel, a.stride / std::gcd(a.stride, a.dilation));
  }
  a.places = ceil_div(a.out_size, a.out_step());
  a.box = a.places;
  return a;
}

// How many places of a row the next row may share: zeros at the end of the one and at the beginning of the other.
int64_t shared(const AxisPlan& a) {
  if (a.box < a.places) return 0;
  const int64_t head = std::max<int64_t>(0, -a.low);
  const int64_t tail = std::max<int64_t>(0, a.reach + a.low - ceil_div(a.in_size, a.in_step()));
  return std::min({head, tail, a.high - a.low});  // places of y stay apart
}

void measure_axes(AxisPlan (&axis)[3]) {
  for (AxisPlan& a : axis) {
    a.box = ceil_div(a.places, ceil_div(a.places, a.box));
    a.reach = a.box + a.high - a.low;
    a.pitch = a.reach - shared(a);
  }
}

// Positions of a box over its places: the rest is zeros, or is packed again for the next box.
double waste(const AxisPlan (&axis)[3]) {
  double waste = 1;
  for (const AxisPlan& a : axis) waste *= static_cast<double>(a.box + a.high - a.low) / static_cast<double>(a.box);
  return waste;
}

// Makes boxes smaller until the packed images fit into the last-level cache; or into the workspace, if taps reach far.
template <class Bytes>
void cut(AxisPlan (&axis)[3], Bytes bytes) {
  for (AxisPlan& a : axis) {
    while (bytes() > static_cast<double>(kRoundBytes) && a.box > 1) {
      const int64_t before = a.box;
      a.box = ceil_div(a.box, 2);
      if (waste(axis) <= kMostWaste) continue;
      a.box = before;
      break;
    }
  }
  for (AxisPlan& a : axis) {
    while (bytes() > static_cast<double>(kMostWorkspace) / 2 && a.box > 1) a.box = ceil_div(a.box, 2);
  }
}

// Plans images without zeros, and with one more position for what lies outside.
bool plan_far(const Product& p, int64_t pixel_bytes, Plan& plan) {
  const auto most = static_cast<double>(kMostWorkspace);
  const auto taps = static_cast<double>(p.gather.taps()), places = static_cast<double>(p.y.pixels());
  const double image = static_cast<double>(p.x.pixels() + 1) * static_cast<double>(pixel_bytes);
  if (image > most * 3 / 4 || taps * places * sizeof(int64_t) > most / 16 || taps * sizeof(gemm::Tap) > most / 16) {
    return false;
  }
  plan.far = true;
  plan.images = std::clamp<int64_t>(kRoundBytes / std::max<int64_t>(1, p.x.pixels() * pixel_bytes), 1,
                                    std::max<int64_t>(1, p.x.n));
  plan.round = plan.images * p.x.pixels() + 1;
  plan.panel_bytes = static_cast<size_t>(plan.round * pixel_bytes);
  plan.place_bytes = static_cast<size_t>(p.y.pixels()) * sizeof(int64_t);
  plan.source_bytes = static_cast<size_t>(p.gather.taps()) * plan.place_bytes;
  plan.tap_bytes = static_cast<size_t>(p.gather.taps()) * sizeof(gemm::Tap);
  return true;
}

}  // namespace

int64_t AxisPlan::residue(int64_t phase) const {
  if (inverse) return 0;
  const int64_t at = phase * dilation - padding;
  return at - floor_div(at, stride) * stride;
}

int64_t AxisPlan::shift_of(int64_t tap, int64_t f) const {
  const int64_t at = inverse ? f + padding - tap * dilation : tap * dilation - padding;
  const int64_t shift = floor_div(at, stride);
  return inverse && shift * stride != at ? -1 : shift - low;
}

size_t Plan::workspace_bytes() const {
  return fits ? panel_bytes + weight_bytes + 2 * place_bytes + source_bytes + tap_bytes + kAreas * kAlignment : 0;
}

Plan plan_product(const Product& p) {
  Plan plan;
  for (size_t i = 0; i < 3; ++i) plan.axis[i] = plan_axis(p.gather, p.x, p.y, i);
  const int64_t b = p.layout.block_size, size = size_of(sum_dtype(p.dtype)), taps = p.gather.taps();
  const int64_t channels = round_up(p.x.channels, b);
  // In double, because a geometry may ask for any size.
  const auto image_bytes = [&] {
    auto bytes = static_cast<double>(channels * size);
    for (const AxisPlan& a : plan.axis) {
      bytes *= static_cast<double>(a.box + a.high - a.low) * static_cast<double>(a.phases);
    }
    return bytes;
  };
  const auto most = static_cast<double>(kMostWorkspace);
  const double tap_bytes = static_cast<double>(taps) * static_cast<double>(sizeof(gemm::Tap));
  const double weight_bytes = static_cast<double>(p.layout.blocks * b * b * size) * static_cast<double>(taps);
  const auto keep_weights = [&] {
    const double left = most - static_cast<double>(plan.workspace_bytes());
    if (weight_bytes <= std::min(static_cast<double>(kWeightBytes), left)) {
      plan.weight_bytes = static_cast<size_t>(weight_bytes);
    }
  };
  cut(plan.axis, image_bytes);
  if (waste(plan.axis) > kMostWaste && plan_far(p, channels * size, plan)) {
    keep_weights();
    return plan;
  }
  plan.fits = image_bytes() <= most / 2 && tap_bytes <= most / 16;
  if (!plan.fits) return plan;
  measure_axes(plan.axis);
  const AxisPlan &z = plan.axis[0], &y = plan.axis[1], &x = plan.axis[2];
  plan.positions = plan.offset(z.reach - 1, y.reach - 1, x.reach);
  plan.phases = z.phases * y.phases * x.phases;
  const int64_t positions = plan.phases * plan.positions;
  plan.images = std::clamp<int64_t>(kRoundBytes / std::max<int64_t>(1, positions * channels * size), 1,
                                    std::max<int64_t>(1, p.x.n));
  plan.round = plan.images * positions;
  plan.panel_bytes = static_cast<size_t>(plan.round * channels * size);
  plan.place_bytes = static_cast<size_t>(z.box * y.box * x.box) * sizeof(int64_t);
  plan.tap_bytes = static_cast<size_t>(tap_bytes);
  plan.fits = plan.workspace_bytes() <= kMostWorkspace;
  if (plan.fits) keep_weights();
  return plan;
}

size_t GradientPlan::workspace_bytes() const {
  if (!fits) return 0;
  const size_t packed = static_cast<size_t>(at_once) * (gathered_bytes + plain_bytes + run_bytes);
  return packed + shift_bytes + sum_bytes + kAreas * kAlignment;
}

GradientPlan plan_gradient(const WeightGradient& g) {
  GradientPlan plan;
  for (size_t i = 0; i < 3; ++i) plan.axis[i] = plan_axis(g.gather, g.gathered(), g.plain(), i);
  const int64_t b = g.layout.block_size, size = size_of(sum_dtype(g.dtype));
  const int64_t gathered = round_up(g.gathered().channels, b), plain = round_up(g.plain().channels, b);
  const auto image_bytes = [&] {
    auto reached = static_cast<double>(gathered * size), own = static_cast<double>(plain * size);
    for (const AxisPlan& a : plan.axis) {
      reached *= static_cast<double>(a.box + a.high - a.low) * static_cast<double>(a.phases);
      own *= static_cast<double>(a.box);
    }
    return reached + own;
  };
  cut(plan.axis, image_bytes);
  for (AxisPlan& a : plan.axis) {
    if (&a == &plan.axis[2]) break;  // whole rows share their zeros
    while (image_bytes() > static_cast<double>(kCacheBytes) && a.box / 2 > 2 * (a.high - a.low)) {
      a.box = ceil_div(a.box, 2);
    }
  }
  const auto most = static_cast<double>(kMostWorkspace);
  const double shift_bytes = static_cast<double>(g.gather.taps()) * static_cast<double>(sizeof(int64_t));
  const double own_bytes = static_cast<double>(g.gathered().pixels()) * static_cast<double>(gathered * size) +
                           static_cast<double>(g.plain().pixels()) * static_cast<double>(plain * size);
  const AxisPlan(&axis)[3] = plan.axis;
  const double runs = static_cast<double>(axis[0].places) * static_cast<double>(axis[1].places) *
                      static_cast<double>(ceil_div(axis[2].places, kStepTokens)) * sizeof(gemm::TokenRun);
  const double sums = size_of(g.dtype) < size ? static_cast<double>(kSumBytes) : 0;
  // DeepLab's convolution takes 39 MB: 2048 channels to 256 at 65 x 65, dilation 24 and 36.
  const bool holds_image = own_bytes + runs + sums + shift_bytes <= most * 49 / 50;
  plan.far = waste(plan.axis) > kMostWaste && g.gather.stride[2] == 1 && holds_image;
  if (plan.far) {
    for (AxisPlan& a : plan.axis) a.box = a.places;
  }
  plan.fits = (plan.far || image_bytes() <= most / 2) && shift_bytes <= most / 8;
  if (!plan.fits) return plan;
  measure_axes(plan.axis);
  const AxisPlan &z = plan.axis[0], &y = plan.axis[1], &x = plan.axis[2];
  plan.positions = plan.far ? g.gathered().pixels() : plan.offset(z.reach - 1, y.reach - 1, x.reach);
  plan.phases = plan.far ? 1 : z.phases * y.phases * x.phases;
  const double bytes = plan.far ? own_bytes : image_bytes();
  plan.images = std::clamp<int64_t>(kCacheBytes / std::max<int64_t>(1, static_cast<int64_t>(bytes)), 1,
                                    std::max<int64_t>(1, g.rows.n));
  plan.gathered_round = plan.images * plan.phases * plan.positions;
  plan.plain_round = plan.images * z.box * y.box * x.box;
  plan.gathered_bytes = static_cast<size_t>(plan.gathered_round * gathered * size);
  plan.plain_bytes = static_cast<size_t>(plan.plain_round * plain * size);
  plan.run_bytes =
      static_cast<size_t>(plan.images * z.box * y.box * ceil_div(x.box, kStepTokens)) * sizeof(gemm::TokenRun);
  if (!plan.far) {
    const auto round_bytes = static_cast<int64_t>(plan.gathered_bytes + plan.plain_bytes);
    plan.at_once = std::clamp<int64_t>(kRoundBytes / std::max<int64_t>(1, round_bytes), 1,
                                       std::max<int64_t>(1, plan.rounds(g.rows.n)));
  }
  plan.shift_bytes = static_cast<size_t>(shift_bytes);
  if (size_of(g.dtype) < size && g.layout.blocks > 0) {
    const int64_t block_bytes = g.gather.taps() * b * b * size;
    plan.blocks = std::clamp<int64_t>(kSumBytes / block_bytes, 1, g.layout.blocks);
    plan.sum_bytes = static_cast<size_t>(plan.blocks * block_bytes);
  }
  plan.fits = plan.workspace_bytes() <= kMostWorkspace;
  return plan;
}

}  // namespace blocksparse::conv
