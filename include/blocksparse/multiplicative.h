// The multiplicative LSTM: a sequence through a cell that first multiplies its state by a projection of the input. With
// two block-sparse weights, W_m [H, H] and W [4 H, H], for t = 0, 1, ...
//
//   m   = factor[t] * (W_m h)
//   z   = pre[t] + W m             four gates of H units each, in the order i, f, g, o
//   c   = sigmoid(z_f) c + sigmoid(z_i) tanh(z_g)
//   h   = sigmoid(z_o) tanh(c)     y[t] = h
//
// factor and pre hold what does not depend on the state: projections of the input. The caller makes them for all steps.
//
// Promises of both passes
//   - All tensors are contiguous. h, y, factor, pre, weights and their gradients are of one dtype (f32, f64, bf16,
//     f16); c is f32 (f64 for f64), and so are all sums.
//   - Sequences may have different lengths. After its last step a sequence keeps its state, and its y is 0. factor and
//     pre must be finite there as well, otherwise gradients are not.
//   - steps, n or any length may be 0. Two runs give the same bits, whatever the number of threads.
//   - Nothing is allocated: `workspace` needs at least what multiplicative_<pass>_workspace_size() says.
//   - What is wrong with the arguments is answered by invalid_argument before anything is written.
//   - On a CUDA card work is queued on `stream`, nothing is waited for, and a call may be captured in a graph.
//
// Source: Krause, Lu, Murray and Renals, "Multiplicative LSTM for sequence modelling", arXiv:1609.07959 (2016).
#pragma once

#include <cstddef>
#include <cstdint>

#include "blocksparse/export.h"
#include "blocksparse/layout.h"
#include "blocksparse/status.h"
#include "blocksparse/stream.h"
#include "blocksparse/tensor.h"

namespace blocksparse {

struct MultiplicativeInputs {
  LayoutView layout_m, layout;       // of W_m [H, H] and W [4 H, H]
  ConstTensor w_m, w;                // [blocks, b, b]
  ConstTensor factor;                // [steps, n, H], H a multiple of 8
  ConstTensor pre;                   // [steps, n, 4, H]
  ConstTensor h0, c0;                // [n, H]
  const int64_t* lengths = nullptr;  // [n], 0 to steps each, as LstmInputs::lengths
};

// Outputs overlap neither each other nor inputs.
struct MultiplicativeOutputs {
  Tensor y;         // [steps, n, H]
  Tensor h, c;      // [n, H]: the state after each sequence's last step
  Workspace saved;  // multiplicative_saved_size() bytes for the backward pass; empty: there will be no backward pass
};

[[nodiscard]] BS_EXPORT Status multiplicative_forward(const MultiplicativeInputs& in, const MultiplicativeOutputs& out,
                                                      Workspace workspace, Stream stream = {});

// What the forward pass gave.
struct MultiplicativeSaved {
  ConstTensor y;
  Workspace saved;  // only read
};

// Gradients of the outputs. One that is not given is 0.
struct MultiplicativeOutputGrads {
  ConstTensor y;     // [steps, n, H]
  ConstTensor h, c;  // [n, H]
};

struct MultiplicativeGrads {
  Tensor w_m, w;  // [blocks, b, b], dtype of w or f32 (f64 for f64); either may be left out
  Tensor factor;  // [steps, n, H]
  Tensor pre;     // [steps, n, 4, H]
  Tensor h0, c0;  // [n, H]; either may be left out
};

// Backpropagation through all steps; `in` is what the forward pass was given. Each dW is one product over all steps.
// Only the first step of W_m, which reads h0, is a product of its own and is added.
[[nodiscard]] BS_EXPORT Status multiplicative_backward(const MultiplicativeInputs& in, const MultiplicativeSaved& saved,
                                                       const MultiplicativeOutputGrads& of_outputs,
                                                       const MultiplicativeGrads& grads, Workspace workspace,
                                                       Stream stream = {});

// A call without its data: the argument of the functions that say how much memory it needs.
struct MultiplicativeProblem {
  LayoutView layout_m = {}, layout = {};  // of W_m [H, H] and W [4 H, H]
  DType dtype = DType::f32;               // of factor and y
  int64_t steps = 0, n = 0;               // n sequences
};

// Bytes of workspace: see Workspace in stream.h. multiplicative_saved_size() gives the bytes of
// MultiplicativeOutputs::saved.
BS_EXPORT size_t multiplicative_saved_size(const MultiplicativeProblem& problem, Device device = {});
BS_EXPORT size_t multiplicative_forward_workspace_size(const MultiplicativeProblem& problem, Device device = {});
BS_EXPORT size_t multiplicative_backward_workspace_size(const MultiplicativeProblem& problem, Device device = {});

}  // namespace blocksparse
