// The layer norm between the matrices of a recurrent network, with what follows it there, in one pass over memory:
//
//   z = (x^ gain + shift) factor + term       x^ = (x - mean) / sqrt(variance + epsilon), over the last dimension
//   y = z, or max(z, 0)
//
// Promises of both passes
//   - x is [n, groups, H]: each of the groups (the gates of an LSTM, say) has a norm of its own. All tensors are
//     contiguous. x, y, factor, term and their gradients are of one dtype (f32, f64, bf16, f16); gain, shift, stats and
//     their gradients are f32 (f64 for f64), and so is all arithmetic.
//   - Nothing is allocated, and two runs give the same bits. What is wrong with the arguments is answered by
//     invalid_argument before anything is written. n may be 0.
//   - On a CUDA card work is queued on `stream`, and may be captured in a graph; on the CPU it is done on return.
#pragma once

#include "blocksparse/export.h"
#include "blocksparse/status.h"
#include "blocksparse/stream.h"
#include "blocksparse/tensor.h"

namespace blocksparse {

struct LayerNormInputs {
  ConstTensor x = {};                  // [n, groups, H]
  ConstTensor gain = {}, shift = {};   // [groups, H]
  ConstTensor factor = {}, term = {};  // [n, groups, H]; what is not given is 1 and 0
  bool relu = false;
  double epsilon = 1e-5;
};

struct LayerNormOutputs {
  Tensor y;      // [n, groups, H]; overlaps no input
  Tensor stats;  // [n, groups, 2]: mean and 1 / sqrt(variance + epsilon), which the backward pass needs
};

[[nodiscard]] BS_EXPORT Status layer_norm_forward(const LayerNormInputs& in, const LayerNormOutputs& out,
                                                  Stream stream = {});

// The norm of an LSTM's four gates, in the order i, f, g, o, and one step of its cell, as one call:
//
//   z^_k = (z_k - mean) / sqrt(variance + epsilon) gain_k + shift_k     each gate k for itself
//   c    = sigmoid(z^_f) c0 + sigmoid(z^_i) tanh(z^_g)      h = sigmoid(z^_o) tanh(c)
//
// The normalised gates are not rounded between. Backward is that of the cell and of the norm.
struct LayerNormCellInputs {
  ConstTensor z = {};                 // [n, 4, H]
  ConstTensor gain = {}, shift = {};  // [4, H]
  ConstTensor c0 = {};                // [n, H], f32 (f64 for f64)
  double epsilon = 1e-5;
};

// Overlap neither each other nor inputs.
struct LayerNormCellOutputs {
  Tensor h;           // [n, H], dtype of z
  Tensor c;           // [n, H], f32 (f64 for f64)
  Tensor gates = {};  // [n, 4, H], behind their nonlinearities    what backward needs: either may be left out
  Tensor stats = {};  // [n, 4, 2]
};

[[nodiscard]] BS_EXPORT Status layer_norm_cell_forward(const LayerNormCellInputs& in, const LayerNormCellOutputs& out,
                                                       Stream stream = {});

// What the forward pass was given and gave.
struct LayerNormSaved {
  ConstTensor x, gain, shift, factor, y, stats;  // y is needed with relu, shift for the factor's gradient
  bool relu = false;
};

// Overlap neither each other nor inputs. All may be left out, but x or gain is given; gain and shift are given both or
// neither. gain and shift alone are those of many steps in one call.
struct LayerNormGrads {
  Tensor x = {};                  // [n, groups, H]
  Tensor gain = {}, shift = {};   // [groups, H]
  Tensor factor = {}, term = {};  // [n, groups, H]
};

[[nodiscard]] BS_EXPORT Status layer_norm_backward(const LayerNormSaved& saved, ConstTensor dy,
                                                   const LayerNormGrads& grads, Stream stream = {});

}  // namespace blocksparse
