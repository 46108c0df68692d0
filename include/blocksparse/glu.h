// Gated linear units, the first half of the feed-forward part of many language models (SwiGLU with silu):
//
//   y = f(gate) * up      gate = x W_gate^T + bias_gate,  up = x W_up^T + bias_up      [n, hidden] each
//
// One weight W [interleaved_features(hidden), in] with one layout holds both: eight rows of W_gate, the eight rows of
// W_up with the same numbers, then the next eight of each. z = x W^T + bias is interleaved likewise, so a block of 16
// or more rows sums both halves of each of its hidden features in one place. Rows that fill up the last eight have no
// effect: no y reads them.
//
// Promises of all passes
//   - f is relu, gelu, silu or gelu_tanh. It is computed in f32 (f64 for f64) and rounded once, at the end.
//   - Types, strides of x, workspace, streams, NaN and errors: as in ops.h. y, z, dy and dz are features-last.
//   - Two runs give the same bits.
// Source: Shazeer, GLU Variants Improve Transformer (2020), arXiv:2002.05202.
#pragma once

#include <cstddef>
#include <cstdint>

#include "blocksparse/ops.h"

namespace blocksparse {

inline constexpr int64_t kInterleaved = 8;  // features of the gate side by side, followed by as many of up

// The number of features of z.
constexpr int64_t interleaved_features(int64_t hidden) {
  return 2 * ((hidden + kInterleaved - 1) / kInterleaved * kInterleaved);
}
// The index in z of a hidden feature's gate. Its up is kInterleaved further.
constexpr int64_t gate_of(int64_t feature) {
  return feature / kInterleaved * 2 * kInterleaved + feature % kInterleaved;
}

// Both products and y = f(gate) * up, in one launch if b >= 16 and, on a card, the type has 16 bits. Otherwise a first
// launch makes z in the workspace, rounded to the dtype of x, and a second one y.
//   x  [n, layout.in_features()]
//   w  layout.out_features() is interleaved_features(hidden)
//   epilogue  bias [layout.out_features()] and f; no residual
//   y  [n, hidden]     dtype of x; overwritten, overlaps no input
[[nodiscard]] BS_EXPORT Status linear_glu_fprop(const LayoutView& layout, ConstTensor x, const Weights& w,
                                                const Epilogue& epilogue, Tensor y, Workspace workspace,
                                                Stream stream = {});
BS_EXPORT size_t linear_glu_fprop_workspace_size(const LinearProblem& problem, Device device = {});

// y = f(gate) * up.   z [n, interleaved_features(hidden)]   y [n, hidden]; all contiguous, no workspace
[[nodiscard]] BS_EXPORT Status glu_forward(ConstTensor z, Activation activation, Tensor y, Stream stream = {});

// The gradient of z in one pass: dz of the gate = dy f'(gate) up, dz of up = dy f(gate). Features that no y reads get
// 0. relu'(0) is 0.
//   dy [n, hidden]   dz like z
[[nodiscard]] BS_EXPORT Status glu_backward(ConstTensor z, ConstTensor dy, Activation activation, Tensor dz,
                                            Stream stream = {});

}  // namespace blocksparse
