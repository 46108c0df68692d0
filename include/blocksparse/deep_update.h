// The deep-update LSTM: a sequence through a cell whose state passes several block-sparse matrices before its gates, so
// that all units mix at every step. With norm(v) = (v - mean) / sqrt(variance + epsilon) * gain + shift over H units,
// each matrix having a gain and a shift of its own, for t = 0, 1, ...
//
//   u = norm(W_0 h) * factor[t]
//   u = relu(norm(W_1 u) + term[t])
//   u = relu(norm(W_j u))               j = 2, ... up to the one before the last
//   z = norm(W_last u)                  W_last is [4 H, H]: the gates i, f, g, o, with a norm each
//   c = sigmoid(z_f) c + sigmoid(z_i) tanh(z_g)
//   h = sigmoid(z_o) tanh(c)            y[t] = h
//
// factor and term are the projections of the network's input. The caller makes them for all steps.
//
// Promises of both passes
//   - All tensors are contiguous. h, y, factor, term, w and their gradients are of one dtype (f32, f64, bf16, f16); c,
//     gains, shifts and their gradients are f32 (f64 for f64), and so are all sums.
//   - Sequences may have different lengths. After its last step a sequence keeps its state, and its y is 0.
//   - steps, n or any length may be 0. Two runs give the same bits, whatever the number of threads.
//   - Nothing is allocated: `workspace` needs at least what deep_update_<pass>_workspace_size() says.
//   - What is wrong with the arguments is answered by invalid_argument before anything is written.
//   - On a CUDA card work is queued on `stream`, nothing is waited for, and a call may be captured in a graph.
//
// Source: Gray, Radford and Kingma, "GPU kernels for block-sparse weights" (2017).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "blocksparse/export.h"
#include "blocksparse/layout.h"
#include "blocksparse/status.h"
#include "blocksparse/stream.h"
#include "blocksparse/tensor.h"

namespace blocksparse {

struct DeepUpdateMatrix {
  LayoutView layout;        // of W [H, H], the last one's [4 H, H]
  ConstTensor w;            // [layout.blocks, b, b]
  ConstTensor gain, shift;  // [H], the last one's [4, H]
};

struct DeepUpdateInputs {
  std::span<const DeepUpdateMatrix> matrices;  // 3 to 64
  ConstTensor factor, term;                    // [steps, n, H], H a multiple of 8
  ConstTensor h0, c0;                          // [n, H]
  const int64_t* lengths = nullptr;            // [n], 0 to steps each, as LstmInputs::lengths
  double epsilon = 1e-6;
};

// Outputs overlap neither each other nor inputs.
struct DeepUpdateOutputs {
  Tensor y;         // [steps, n, H]
  Tensor h, c;      // [n, H]: the state after each sequence's last step
  Workspace saved;  // deep_update_saved_size() bytes for the backward pass; empty: there will be no backward pass
};

[[nodiscard]] BS_EXPORT Status deep_update_forward(const DeepUpdateInputs& in, const DeepUpdateOutputs& out,
                                                   Workspace workspace, Stream stream = {});

// What the forward pass gave.
struct DeepUpdateSaved {
  ConstTensor y;
  Workspace saved;  // only read
};

// Gradients of the outputs. One that is not given is 0.
struct DeepUpdateOutputGrads {
  ConstTensor y;     // [steps, n, H]
  ConstTensor h, c;  // [n, H]
};

struct DeepUpdateMatrixGrads {
  Tensor w;            // [blocks, b, b], dtype of w or f32 (f64 for f64); may be left out
  Tensor gain, shift;  // like them
};

struct DeepUpdateGrads {
  std::span<const DeepUpdateMatrixGrads> matrices;  // as many as there are
  Tensor factor, term;                              // [steps, n, H]
  Tensor h0, c0;                                    // [n, H]; either may be left out
};

// Backpropagation through all steps; `in` is what the forward pass was given. Each dW is one product over all steps.
// Only the first step of W_0, which reads h0, is a product of its own and is added. Gradients of gains and shifts are
// summed over all steps at once on a card, and step by step on the CPU.
[[nodiscard]] BS_EXPORT Status deep_update_backward(const DeepUpdateInputs& in, const DeepUpdateSaved& saved,
                                                    const DeepUpdateOutputGrads& of_outputs,
                                                    const DeepUpdateGrads& grads, Workspace workspace,
                                                    Stream stream = {});

// A call without its data: the argument of the functions that say how much memory it needs.
struct DeepUpdateProblem {
  std::span<const DeepUpdateMatrix> matrices = {};  // only the layouts are looked at; they say H
  DType dtype = DType::f32;                         // of factor and y
  int64_t steps = 0, n = 0;                         // n sequences
};

// Bytes of workspace: see Workspace in stream.h. deep_update_saved_size() gives the bytes of DeepUpdateOutputs::saved.
BS_EXPORT size_t deep_update_saved_size(const DeepUpdateProblem& problem, Device device = {});
BS_EXPORT size_t deep_update_forward_workspace_size(const DeepUpdateProblem& problem, Device device = {});
BS_EXPORT size_t deep_update_backward_workspace_size(const DeepUpdateProblem& problem, Device device = {});

}  // namespace blocksparse
