// The LSTM op: a whole sequence through a cell whose recurrent weight W [4 H, H] is block-sparse. For t = 0, 1, ...
//
//   z   = pre[t] + W h            four gates of H units each, in the order i, f, g, o of torch.nn.LSTM
//   c   = sigmoid(z_f) c + sigmoid(z_i) tanh(z_g)
//   h   = sigmoid(z_o) tanh(c)    y[t] = h
//
// pre holds what does not depend on the state: the input's projection and all biases. One linear op makes it for all
// steps. The gates' weights lie one below the other, so values[blocks, b, b] is the BSR of weight_hh of torch.nn.LSTM.
// Gates may share one layout (Layout::stack): each tile of h that was loaded then serves all four.
//
// Promises of both passes
//   - All tensors are contiguous. pre, y, gates, h, w and their gradients are of one dtype (f32, f64, bf16, f16); c is
//     f32 (f64 for f64), and so are all sums and the arithmetic between products.
//   - Sequences may have different lengths. After its last step a sequence keeps its state, its y is 0, and gradients
//     of pre are 0 there.
//   - steps, n or any length may be 0. The order of sums depends on shapes and layout alone: two runs give the same
//     bits, whatever the number of threads.
//   - Nothing is allocated: `workspace` needs at least what lstm_<pass>_workspace_size() says.
//   - What is wrong with the arguments is answered by invalid_argument before anything is written.
//   - On a CUDA card work is queued on `stream`, nothing is waited for, and a call may be captured in a graph. A card
//     rounds 16-bit types once more than the CPU, where it stores the product of a step. It does not where one kernel
//     does all steps (compute capability 9.0, weights that fit the chip, up to 64 sequences).
#pragma once

#include <cstddef>
#include <cstdint>

#include "blocksparse/export.h"
#include "blocksparse/layout.h"
#include "blocksparse/ops.h"
#include "blocksparse/status.h"
#include "blocksparse/stream.h"
#include "blocksparse/tensor.h"

namespace blocksparse {

struct LstmInputs {
  ConstTensor pre;     // [steps, n, 4, H]
  ConstTensor w;       // [layout.blocks, b, b]
  ConstTensor h0, c0;  // [n, H]; not given: 0
  // [n], 0 to steps each, in the memory of the tensors' device; null: all sequences have all steps. The CPU refuses a
  // length out of range, and takes less time if the longest sequences come first. A card takes the nearest length that
  // is in range.
  const int64_t* lengths = nullptr;
};

// Outputs overlap neither each other nor inputs.
struct LstmOutputs {
  Tensor y;      // [steps, n, H]
  Tensor h, c;   // [n, H]: the state after each sequence's last step; either may be left out
  Tensor gates;  // [steps, n, 4, H], after their nonlinearities; for the backward pass: gates and cells, or neither
  Tensor cells;  // [steps, n, H]: c after each step
};

// `layout` is [4 H, H], not transposed; H is a multiple of b.
[[nodiscard]] BS_EXPORT Status lstm_forward(const LayoutView& layout, const LstmInputs& in, const LstmOutputs& out,
                                            Workspace workspace, Stream stream = {});

// What the forward pass was given and gave.
struct LstmSaved {
  ConstTensor w, h0, c0;
  const int64_t* lengths = nullptr;
  ConstTensor y, gates, cells;
};

// Gradients of the outputs. One that is not given is 0.
struct LstmOutputGrads {
  ConstTensor y;     // [steps, n, H]
  ConstTensor h, c;  // [n, H]
};

struct LstmGrads {
  Tensor pre;     // [steps, n, 4, H]; always needed: dW is one product of it over all steps
  Tensor w;       // [blocks, b, b], dtype of w or f32 (f64 for f64); may be left out
  Tensor h0, c0;  // [n, H]; either may be left out
};

// Backpropagation through all steps. To truncate it, call it for a part of the sequence, whose h0 and c0 are the state
// at the end of the part before. grads.w is written, or added to with Accumulate::yes.
[[nodiscard]] BS_EXPORT Status lstm_backward(const LayoutView& layout, const LstmSaved& saved,
                                             const LstmOutputGrads& of_outputs, Accumulate accumulate,
                                             const LstmGrads& grads, Workspace workspace, Stream stream = {});

// A call without its data: the argument of the workspace functions.
struct LstmProblem {
  LayoutView layout = {};    // [4 H, H]
  DType dtype = DType::f32;  // of pre and y
  int64_t steps = 0, n = 0;  // n sequences
};

// Bytes of workspace: see Workspace in stream.h.
BS_EXPORT size_t lstm_forward_workspace_size(const LstmProblem& problem, Device device = {});
BS_EXPORT size_t lstm_backward_workspace_size(const LstmProblem& problem, Device device = {});

}  // namespace blocksparse
