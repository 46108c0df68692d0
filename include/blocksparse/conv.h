// The convolution: dense in space, block-sparse over channels. A layout over (out channels, in channels) says which
// blocks the filter has; each of them has all taps.
//
//   fprop   y[n, o, p]     = f(sum over c, tap of W[o, c, tap] x[n, c, p * stride - padding_before + tap * dilation]
//                              + bias[o] + residual[n, o, p])
//   dgrad   dx             = the gradient of x
//   wgrad   dW[block, tap] = sum over n, p of dy[n, out, p] x[n, in, p * stride - padding_before + tap * dilation]
//
// In a transposed convolution x and y change places in space: y[n, o, p * stride - padding_before + tap * dilation]
// receives W[o, c, tap] x[n, c, p]. What lies outside of x is 0. Filters are not mirrored, as in all frameworks.
//
// Promises of all three
//   - Activations are [n, channels, size...] with 1 to 3 sizes: (width), (height, width) or (depth, height, width).
//     They are f32, f64, bf16 or f16, and dense: either channels-last (strides as if [n, size..., channels] were
//     contiguous), which is the fast order, or contiguous. All activations of a call are in one order. Any n >= 0.
//   - The filter is values[blocks, taps, b, b], each block and tap row-major [out, in]; taps are in the order of the
//     kernel's sizes, the last one fastest. Channel counts need not be multiples of b. A transposed convolution's
//     filter is [blocks, taps, out, in] as well.
//   - The layout may be transposed (layout.t()): then out and in change places and the values are read transposed.
//   - A channel order is a permutation of the channels of x: a shuffle, or the pairing of channels that a concatenation
//     has put apart. The CPU checks it. A card does not read it before its use: an entry outside of 0 to channels - 1
//     reads as a channel of zeros and writes nothing; of two equal entries either may write; channels of dx that no
//     entry names are 0 or left alone. Memory beside the tensors is never touched.
//   - On the CPU an order costs nothing. On a card, 16-bit channels-last images are copied in that order into the
//     workspace (dx out of it), if the fast kernels would take x without an order and 8 divides its channels. The copy
//     runs at the speed of memory, in slices of whole images where all of them would need more than 64 MB. Every other
//     problem with an order takes the kernels for any problem, element by element.
//   - Products are summed in f32 (f64 for f64) in an order that depends on layout and shapes alone: two runs give the
//     same bits, whatever the number of threads.
//   - Nothing is allocated, and no buffer of gathered pixels exists: `workspace` needs at least what
//     conv_<pass>_workspace_size() says, less than 64 MB. On a card, one tap in place is the linear op and needs what
//     that op needs.
//   - NaN and Inf propagate as arithmetic says, except that a block with gate 0 is skipped. Padding may count as zeros
//     that meet an Inf or NaN of W, or not at all. Likewise an Inf or NaN at the edge of an image may meet zeros of
//     padding, in the dW of taps that do not read it.
//   - What is wrong with the arguments is answered by invalid_argument before anything is written.
//   - Work is queued on `stream`; on the CPU it is done on return. Calls from several threads may share a layout.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "blocksparse/export.h"
#include "blocksparse/layout.h"
#include "blocksparse/ops.h"
#include "blocksparse/status.h"
#include "blocksparse/stream.h"
#include "blocksparse/tensor.h"

namespace blocksparse {

inline constexpr int kMaxSizes = 3;
// In the order of a tensor's dimensions; those beyond the rank are unused.
using SpatialSizes = std::array<int64_t, kMaxSizes>;

struct ConvGeometry {
  int32_t rank = 2;  // sizes of an image: 1 to 3
  bool transposed = false;
  SpatialSizes kernel = {1, 1, 1}, stride = {1, 1, 1}, dilation = {1, 1, 1};
  SpatialSizes padding_before = {}, padding_after = {};  // a causal convolution pads before only
  // For a transposed convolution: added to the sizes of y; less than the stride or the dilation.
  SpatialSizes output_padding = {};
};

// The sizes of y for given sizes of x, or what is wrong with the geometry:
//   (size + padding_before + padding_after - dilation * (kernel - 1) - 1) / stride + 1
//   (size - 1) * stride - padding_before - padding_after + dilation * (kernel - 1) + output_padding + 1   transposed
[[nodiscard]] BS_EXPORT Result<SpatialSizes> conv_output_size(const ConvGeometry& geometry, const SpatialSizes& size);

// What stays unchanged from call to call: the blocks of the filter, and the geometry in space.
struct Convolution {
  LayoutView layout = {};  // [out channels, in channels], on the device of the tensors
  ConvGeometry geometry = {};
  // Channel c of the layout's inputs is channel channel_order[c] of x and of dx. One entry a channel, in the memory of
  // the tensors' device. Empty: channel c is channel c.
  std::span<const int32_t> channel_order = {};
};

//   x  [n, in channels, size...]
//   y  [n, out channels, conv_output_size(size)...]   dtype of x; overwritten, overlaps no input
//   epilogue.bias [out channels]; epilogue.residual is like y
[[nodiscard]] BS_EXPORT Status conv_fprop(const Convolution& conv, ConstTensor x, const Weights& w,
                                          const Epilogue& epilogue, Tensor y, Workspace workspace, Stream stream = {});

//   dy [n, out channels, conv_output_size(size)...]
//   dx [n, in channels, size...]   dtype of dy; overwritten, overlaps no input
[[nodiscard]] BS_EXPORT Status conv_dgrad(const Convolution& conv, ConstTensor dy, const Weights& w, Tensor dx,
                                          Workspace workspace, Stream stream = {});

// With S = the sum above:   grads.values[i] = gates[i] S_i,   grads.gates[i] = <S_i, w.values[i]> over all taps.
//   grads.values  [blocks, taps, b, b], dtype of x or f32 (f64 for f64)
//   grads.gates   [blocks], f32 (f64 for f64); may be left out, and needs w.values
// Written, or added to with Accumulate::yes; overlaps no input. Entries of ragged blocks beyond the filter are written
// as 0; Accumulate::yes leaves them alone.
[[nodiscard]] BS_EXPORT Status conv_wgrad(const Convolution& conv, ConstTensor x, ConstTensor dy, const Weights& w,
                                          Accumulate accumulate, const WeightGrads& grads, Workspace workspace,
                                          Stream stream = {});

// A call without its data: the argument of the workspace functions.
struct ConvProblem {
  Convolution conv = {};      // what is in a channel order is not looked at
  DType dtype = DType::f32;   // of the activations
  int64_t n = 0;              // images
  SpatialSizes size = {};     // of x or dx
  bool channels_last = true;  // how the activations lie; false: contiguous
};

// Bytes of workspace: see Workspace in stream.h.
BS_EXPORT size_t conv_fprop_workspace_size(const ConvProblem& problem, Device device = {});
BS_EXPORT size_t conv_dgrad_workspace_size(const ConvProblem& problem, Device device = {});
BS_EXPORT size_t conv_wgrad_workspace_size(const ConvProblem& problem, Device device = {});

}  // namespace blocksparse
