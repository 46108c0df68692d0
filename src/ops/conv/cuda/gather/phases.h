// A convolution as products of gathered images. A forward gather is one product. An inverse gather of stride s is one
// product for each pixel of an s x s tile of y (likewise in one and three dimensions). Within such a phase a step in y
// is a step in x, and every tap meets x everywhere or nowhere. The taps that meet x, mirrored, are a forward gather of
// stride 1.
#pragma once

#include "gemm/images.h"
#include "ops/conv/conv.h"

namespace blocksparse::conv {

// The taps of a phase: start + i * step, i < count, of {depth, height, width}.
struct TapSubset {
  int32_t start[3] = {}, step[3] = {1, 1, 1}, count[3] = {1, 1, 1};
  bool mirrored = false;  // the inputs of the last tap come first

  int64_t taps() const { return int64_t{count[0]} * count[1] * count[2]; }
};

struct Phase {
  gemm::GatheredImages x;
  gemm::ScatteredImages y;
  TapSubset taps;

  int64_t tokens() const { return x.n * x.positions[0] * x.positions[1] * x.positions[2]; }
};

int64_t phase_count(const Gather& gather);
// `y` are the images for which x is gathered. A phase may have no taps, and no tokens.
Phase phase_of(const Gather& gather, const Images& x, const Images& y, int32_t block, int64_t index);

// Whether the copying hardware of sm_90 can walk the phase: see cuda/tensor_map.h.
bool can_walk(const Phase& phase);

}  // namespace blocksparse::conv
