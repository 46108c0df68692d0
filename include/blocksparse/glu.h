// Gated linear units, the first half of the feed-forward part of many language models (SwiGLU with silu):
//
//   y = f(gate) * up      gate = x W_gate^T + bias_gate,  up = x W_up^T + bias_up      [n, hidden] each
//
// One weight W [interleaved_features(hidden), in] with one layout holds both: eight rows of W_gate, the same eight rows
// of W_up, and so on. So z = x W^T + bias has eight features of the gate, the same eight of up, ..., and of a block of
// 16 or more rows both halves of every hidden feature are summed in one place. Rows that fill up the last eight count
// nothing: no y reads them.
//
// Promises of all passes
//   - f is relu, gelu, silu or gelu_tanh; computed in f32 (f64 for f64), and rounded once, at the end.
//   - Types, strides of x, workspace, streams, NaN, errors: as in ops.h. y, z, dy and dz are features-last.
//   - Two runs give the same bits.
// Source: Shazeer, GLU Variants Improve Transformer (2020), arXiv:2002.05202.
#pragma once

#include <cstddef>
#include <cstdint>

#include "blocksparse/ops.h"

namespace blocksparse {

inline constexpr int64_t kInterleaved = 8;  // features of the gate side by side, then those of up

// How many features z has.
constexpr int64_t interleaved_features(int64_t hidden) {
  return 2 * ((hidden + kInterleaved - 1) / kInterleaved * kInterleaved);
}
// Where in z the gate of a hidden feature is; up is kInterleaved further.
constexpr int64_t gate_of(int64_t feature) {
  return feature / kInterleaved * 2 * kInterleaved + feature % kInterleaved;
}

// Both products and y = f(gate) * up in one launch, where that is there: b >= 16, and on a card 16 bits. Otherwise z is
// made in the workspace, rounded to the dtype of x, and y by a second launch.
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

// The gradient of z, in one pass for both: dz of gate = dy f'(gate) up, of up = dy f(gate); 0 where nothing is read.
// relu'(0) is 0.
//   dy [n, hidden]   dz like z
[[nodiscard]] BS_EXPORT Status glu_backward(ConstTensor z, ConstTensor dy, Activation activation, Tensor dz,
                                            Stream stream = {});

}  // namespace blocksparse
