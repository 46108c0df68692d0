// The layer norm between the matrices of a recurrent network, with what follows it there, in one pass over memory:
//
//   z = (x^ gain + shift) factor + term       x^ = (x - mean) / sqrt(variance + epsilon), over the last dimension
//   y = z, or max(z, 0)
//
// Promises of both passes
//   - x is [n, groups, H]. Each group (a gate of an LSTM, for example) has a norm of its own. All tensors are
//     contiguous. x, y, factor, term and their gradients are of one dtype (f32, f64, bf16, f16); gain, shift, stats and
//     their gradients are f32 (f64 for f64), and so is all arithmetic.
//   - Nothing is allocated, and no workspace is needed.
//   - Two runs give the same bits. n may be 0.
//   - What is wrong with the arguments is answered by invalid_argument before anything is written.
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
  ConstTensor factor = {}, term = {};  // [n, groups, H]; not given: 1 and 0
  bool relu = false;
  double epsilon = 1e-5;
};

struct LayerNormOutputs {
  Tensor y;      // [n, groups, H]; overlaps no input
  Tensor stats;  // [n, groups, 2]: mean and 1 / sqrt(variance + epsilon), which the backward pass needs
};

[[nodiscard]] BS_EXPORT Status layer_norm_forward(const LayerNormInputs& in, const LayerNormOutputs& out,
                                                  Stream stream = {});

// What the forward pass was given and gave.
struct LayerNormSaved {
  ConstTensor x, gain, shift, factor, y, stats;  // y is needed with relu, shift for the factor's gradient
  bool relu = false;
};

// Gradients overlap neither each other nor inputs. Each may be left out, but x or gain is given. gain and shift are
// given together or not at all. A call for gain and shift alone may cover many steps at once.
struct LayerNormGrads {
  Tensor x = {};                  // [n, groups, H]
  Tensor gain = {}, shift = {};   // [groups, H]
  Tensor factor = {}, term = {};  // [n, groups, H]
};

[[nodiscard]] BS_EXPORT Status layer_norm_backward(const LayerNormSaved& saved, ConstTensor dy,
                                                   const LayerNormGrads& grads, Stream stream = {});

}  // namespace blocksparse
