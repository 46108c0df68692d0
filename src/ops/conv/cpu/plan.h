// How a convolution on the CPU is divided: a pure function of the problem.
//
// Along each axis pixels are numbered by phase and place: x = in_step * j + r and y = out_step * q + f. Then every tap
// that counts in phase f brings x at (r, j = q + shift) to y at (f, q). A forward gather has in_step = stride and one
// phase of y. An inverse gather has out_step = stride and one phase of x.
//
// A box of places q is packed with all j that its taps reach: a grid with zeros around the image, and a panel for each
// phase of x. In the grid a tap is an offset.
//
//   stride 1, 3 taps:  j = q - 1, q, q + 1     . x x x x .        one panel, one row
//   stride 2, 3 taps:  r = 1: j = q - 1, q     . x x . and x x    two panels: odd pixels, even ones
//
// Rows share their zeros if the box is as wide as y: what pads one row on the right pads the next one on the left.
#pragma once

#include "core/ceil_div.h"
#include "core/places.h"
#include "gemm/cpu/kernels.h"
#include "ops/conv/conv.h"

namespace blocksparse::conv {

struct AxisPlan {
  bool inverse = false;
  int64_t kernel = 1, stride = 1, dilation = 1, padding = 0;
  int64_t in_size = 1, out_size = 1;
  int64_t low = 0, high = 0;  // the smallest and the largest shift
  int64_t phases = 1;         // phases of x that have a tap; tap t reads phase t % phases
  int64_t places = 1;         // places q of y, in the longest phase
  int64_t box = 1;            // places of a box
  int64_t reach = 1;          // places j of a box: box + high - low
  int64_t pitch = 1;          // from one row of the grid to the next along this axis, in steps of the axis below

  int64_t in_step() const { return inverse ? 1 : stride; }
  int64_t out_step() const { return inverse ? stride : 1; }
  int64_t out_phases() const { return std::min(out_step(), out_size); }
  int64_t boxes() const { return ceil_div(places, box); }
  int64_t residue(int64_t phase) const;  // r of a phase of x
  // Places of y in phase f.
  int64_t places_of(int64_t f) const { return ceil_div(out_size - f, out_step()); }
  // Where a tap reads, counted from place q + low; -1 if the tap does not count in phase f.
  int64_t shift_of(int64_t tap, int64_t f) const;
  // The pixel of x at place 0 of the grid of the box that begins at q.
  int64_t first_pixel(int64_t phase, int64_t q) const { return in_step() * (q + low) + residue(phase); }
};

// Images are packed as [blocks of channels][images, phases, positions][b]: a tap is an offset in positions.
struct Plan {
  AxisPlan axis[3];
  int64_t positions = 0;  // of a phase of an image
  int64_t phases = 1;
  int64_t images = 0;  // of a round
  int64_t round = 0;   // positions of a round
  bool far = false;    // grids would be mostly zeros: images are packed without them, and each tap looks its pixels up
  bool fits = true;    // into the workspace that is promised; otherwise plain loops do it
  size_t panel_bytes = 0, weight_bytes = 0, place_bytes = 0, source_bytes = 0, tap_bytes = 0;

  size_t workspace_bytes() const;
  int64_t offset(int64_t z, int64_t y, int64_t x) const { return (z * axis[1].pitch + y) * axis[2].pitch + x; }
};

inline constexpr size_t kMostWorkspace = size_t{56} << 20;

Plan plan_product(const Product& p);

// wgrad: the gathered operand is packed as in Plan, the other one without zeros between its pixels.
struct GradientPlan {
  AxisPlan axis[3];
  int64_t positions = 0;  // of a phase of the gathered operand
  int64_t phases = 1;
  int64_t images = 0;          // of a round
  int64_t at_once = 1;         // rounds that threads pack before they multiply, because a barrier is dear
  int64_t gathered_round = 0;  // tokens of a panel
  int64_t plain_round = 0;
  int64_t blocks = 0;  // whose sums are kept together, if dW is narrower than its sums
  bool far = false;    // as in Plan: each tap has its own runs of pixels
  bool fits = true;
  size_t gathered_bytes = 0, plain_bytes = 0, run_bytes = 0;  // of a round
  size_t shift_bytes = 0, sum_bytes = 0;

  size_t workspace_bytes() const;
  int64_t rounds(int64_t n) const { return axis[0].boxes() * axis[1].boxes() * axis[2].boxes() * ceil_div(n, images); }
  int64_t offset(int64_t z, int64_t y, int64_t x) const { return (z * axis[1].pitch + y) * axis[2].pitch + x; }
};

// Tokens that wgrad takes at a time: their x and dy stay in L1 over all strips. With 128 tokens b = 64 runs at 77
// GFLOP/s, with all tokens at 38 (NOTES.md).
inline constexpr int64_t kStepTokens = 128;

// The plan holds for any dtype of dW.
GradientPlan plan_gradient(const WeightGradient& g);

}  // namespace blocksparse::conv
