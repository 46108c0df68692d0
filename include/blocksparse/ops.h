// The linear op: three products with a weight W [out, in] that is zero outside the blocks of a layout.
//
//   fprop   y  = f(x W^T + bias + residual)     x [n, in]  -> y [n, out]
//   dgrad   dx = dy W                           dy [n, out] -> dx [n, in]
//   wgrad   dW[block] = dy_out^T x_in           for the blocks of the layout; the rest of W has no gradient
//
// Promises of all three
//   - Activations are f32, f64, bf16 or f16, seen as [n, features] with any strides of which the feature stride or the
//     token stride is 1 (features-last, features-first). Leading dimensions that flatten to one token stride are taken
//     as n: [batch, time, features] is accepted. Any n >= 0.
//   - `layout` may be transposed (layout.t()): then out and in change places and the values are read transposed.
//   - Products are summed in f32 (f64 for f64) in an order that depends on layout and shapes alone: two runs give the
//     same bits, whatever the number of threads.
//   - f32 is computed in f32, unless the caller allows tf32 on CUDA: see Math in stream.h.
//   - Nothing is allocated: `workspace` needs at least what the matching *_workspace_size() says.
//   - NaN and Inf propagate as arithmetic says. An output sees those of the inputs that it has blocks for, and no
//     others. A block with gate 0 is skipped, whatever its weights are.
//   - The CPU's instructions for bf16 (avx512_bf16, amx, neon_bf16) treat denormals as 0, and those of neon_bf16 round
//     to odd. For 16-bit types a CUDA card may round the product of a weight and its gate to the type before it
//     multiplies.
//   - What is wrong with the arguments is answered by invalid_argument before anything is written.
//   - Work is queued on `stream`; on the CPU it is done on return. Calls from several threads may share a layout.
#pragma once

#include <cstddef>
#include <span>

#include "blocksparse/export.h"
#include "blocksparse/layout.h"
#include "blocksparse/status.h"
#include "blocksparse/stream.h"
#include "blocksparse/tensor.h"

namespace blocksparse {

// gelu is the exact one, z Phi(z); silu is z / (1 + exp(-z)). gelu_tanh is z / (1 + exp(-2 u)) with
// u = sqrt(2 / pi) (z + 0.044715 z^3), which is z (1 + tanh(u)) / 2.
enum class Activation : int32_t { none = 0, relu = 1, gelu = 2, silu = 3, gelu_tanh = 4 };

// The blocks of W and, if wanted, a factor for each.
struct Weights {
  ConstTensor values;  // [blocks, b, b], contiguous, dtype of the activations
  ConstTensor gates;   // [blocks], f32 (f64 for f64); block i counts gates[i] times

  Weights() = default;
  Weights(ConstTensor values, ConstTensor gates = {})  // NOLINT(google-explicit-constructor)
      : values(values), gates(gates) {}
  Weights(Tensor values) : values(values) {}  // NOLINT(google-explicit-constructor)
};

// y = activation(product + bias + residual). A term that is not given is left out.
struct Epilogue {
  ConstTensor bias = {};      // [out], contiguous, dtype of the activations
  ConstTensor residual = {};  // [n, out], like y
  Activation activation = Activation::none;
};

//   x  [n, layout.in_features()]
//   y  [n, layout.out_features()]   dtype of x; overwritten, overlaps no input
[[nodiscard]] BS_EXPORT Status linear_fprop(const LayoutView& layout, ConstTensor x, const Weights& w,
                                            const Epilogue& epilogue, Tensor y, Workspace workspace,
                                            Stream stream = {});

//   dy [n, layout.out_features()]
//   dx [n, layout.in_features()]    dtype of dy; overwritten, overlaps no input
[[nodiscard]] BS_EXPORT Status linear_dgrad(const LayoutView& layout, ConstTensor dy, const Weights& w, Tensor dx,
                                            Workspace workspace, Stream stream = {});

enum class Accumulate : int32_t { no = 0, yes = 1 };

// One (x, dy) of a list whose products are summed: a time step of a recurrent network, for example.
struct GradPair {
  ConstTensor x;   // [n, layout.in_features()]; n may differ from pair to pair
  ConstTensor dy;  // [n, layout.out_features()], dtype of x
};

struct WeightGrads {
  Tensor values;  // [blocks, b, b], contiguous, dtype of x or f32 (f64 for f64)
  Tensor gates;   // [blocks], f32 (f64 for f64); may be left out

  WeightGrads() = default;
  WeightGrads(Tensor values, Tensor gates = {})  // NOLINT(google-explicit-constructor)
      : values(values), gates(gates) {}
};

// With S = sum over pairs of dy_out^T x_in:   grads.values[i] = gates[i] S_i,   grads.gates[i] = <S_i, w.values[i]>.
//   w      needed with gates: w.gates scale grads.values (not given: 1), w.values make grads.gates
//   grads  written, or added to with Accumulate::yes; overlaps no input. Without pairs, or with n = 0, the sum is 0.
// Entries of ragged blocks beyond the matrix are written as 0; Accumulate::yes leaves them alone. A card may sum the
// pairs in several launches. A dW narrower than f32 is rounded between launches.
[[nodiscard]] BS_EXPORT Status linear_wgrad(const LayoutView& layout, std::span<const GradPair> pairs, const Weights& w,
                                            Accumulate accumulate, const WeightGrads& grads, Workspace workspace,
                                            Stream stream = {});

// A call without its data: the argument of the workspace functions.
struct LinearProblem {
  LayoutView layout = {};
  DType dtype = DType::f32;  // of x and dy
  int64_t n = 0;             // tokens; wgrad: of all pairs together
};

// Bytes of workspace: see Workspace in stream.h. On a card, fewer tokens may need more bytes.
BS_EXPORT size_t linear_fprop_workspace_size(const LinearProblem& problem, Device device = {});
BS_EXPORT size_t linear_dgrad_workspace_size(const LinearProblem& problem, Device device = {});
BS_EXPORT size_t linear_wgrad_workspace_size(const LinearProblem& problem, Device device = {});

}  // namespace blocksparse
