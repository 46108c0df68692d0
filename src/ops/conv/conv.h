// The convolution inside: a call that is checked. Images have three sizes here; if the caller's have fewer, the first
// ones are 1.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "blocksparse/conv.h"
#include "core/index.h"
#include "cpu/isa.h"
#include "gemm/product.h"

namespace blocksparse::conv {

using gemm::Pass;

// Activations that the edge has checked: dense in one of two orders.
struct Images {
  const void* data = nullptr;
  int64_t n = 0, channels = 0;
  SpatialSizes size = {1, 1, 1};  // depth, height, width
  bool channels_last = true;

  int64_t pixels() const { return size[0] * size[1] * size[2]; }
  // Strides are in elements. Pixel (z, y, x) of an image is at ((z * height + y) * width + x) * pixel_stride().
  int64_t image_stride() const { return channels * pixels(); }
  int64_t channel_stride() const { return channels_last ? 1 : pixels(); }
  int64_t pixel_stride() const { return channels_last ? channels : 1; }
};

// Which pixel of the gathered images a tap brings to pixel p of the others, along each axis:
//   forward   p * stride - padding + tap * dilation
//   inverse   (p + padding - tap * dilation) / stride, if that divides; otherwise none
// A pixel outside of the images counts as 0.
struct Gather {
  bool inverse = false;
  SpatialSizes kernel = {1, 1, 1}, stride = {1, 1, 1}, dilation = {1, 1, 1}, padding = {};

  int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
  // Empty if the tap meets no pixel of an axis of length `size`.
  std::optional<int64_t> source(int axis, int64_t p, int64_t tap, int64_t size) const {
    const auto a = static_cast<size_t>(axis);
    int64_t at = inverse ? p + padding[a] - tap * dilation[a] : p * stride[a] - padding[a] + tap * dilation[a];
    if (inverse && at % stride[a] != 0) return std::nullopt;
    if (inverse) at /= stride[a];
    return at >= 0 && at < size ? std::optional(at) : std::nullopt;
  }
};

// Whether the filter's one tap stays in place: then pixels are tokens of a linear layer. Padding behind alone makes
// images of another size.
inline bool is_in_place(const Gather& g, const Images& a, const Images& b) {
  const SpatialSizes one = {1, 1, 1}, none = {};
  return g.kernel == one && g.stride == one && g.padding == none && a.size == b.size;
}

// fprop and dgrad. dgrad is fprop on the transposed layout with the inverse gather. Both compute
//   y[n, o, p] = f(sum over blocks, k, tap of gate * W[o, k, tap] x[n, k, gather(p, tap)]
//                  + bias[o] + residual[n, o, p])
// A transposed convolution has the inverse gather in fprop, and the forward one in dgrad.
struct Product {
  DType dtype = DType::f32;
  LayoutView layout = {};
  bool by_in = false;  // walk columns of W and read each block transposed
  Gather gather = {};
  Images x = {}, y = {};    // y.data is written
  Images residual = {};     // data null: none
  const void* w = nullptr;  // [blocks, taps, b, b]
  const void* gates = nullptr;
  const void* bias = nullptr;
  Activation activation = Activation::none;
  // Null, or a permutation, which on a card nobody has checked. Input k of the layout is channel x_channels[k] of x;
  // output o of the layout goes to channel y_channels[o] of y. At most one of the two is given.
  const int32_t* x_channels = nullptr;
  const int32_t* y_channels = nullptr;
};

// S[block, tap][r, c] = sum over n, p of rows[n, r, P] columns[n, c, Q]. The gathered operand is read at gather(p,
// tap), always forward, and the other one at p. A convolution gathers x, a transposed one dy. Rows are dy, unless the
// layout is transposed.
struct WeightGradient {
  DType dtype = DType::f32;
  DType dw_dtype = DType::f32;
  LayoutView layout = {};  // not transposed
  Gather gather = {};
  bool gathers_rows = false;              // else columns
  Images rows = {}, columns = {};         // of W: out_features and in_features channels
  const int32_t* row_channels = nullptr;  // null, or as in Product
  const int32_t* column_channels = nullptr;
  const void* w = nullptr;
  const void* gates = nullptr;
  void* dw = nullptr;
  void* dgates = nullptr;
  bool accumulate = false;

  const Images& gathered() const { return gathers_rows ? rows : columns; }
  const Images& plain() const { return gathers_rows ? columns : rows; }
};

// Plain loops in double precision: the specification, with which tests compare.
void reference_product(const Product& p);
void reference_weight_gradient(const WeightGradient& g);
// Single results, before rounding; of dW before gates and accumulation. A gradient beyond the filter is empty. `output`
// is the layout's, `pixel` counts those of an image.
double reference_product_at(const Product& p, int64_t image, int64_t output, int64_t pixel);
std::optional<double> reference_gradient_at(const WeightGradient& g, int64_t block, int64_t tap, int64_t row,
                                            int64_t column);

// Workspace sizes are asked for without pointers, so also without gates and dw_dtype. They suffice for any of these.
Status cpu_product(const Product& p, Isa isa, Workspace workspace, int32_t threads);
Status cpu_weight_gradient(const WeightGradient& g, Isa isa, Workspace workspace, int32_t threads);
size_t cpu_workspace_size(const Product& p);
size_t cpu_workspace_size(const WeightGradient& g);

// The CUDA path. A build without it returns `unavailable`.
Status cuda_product(const Product& p, Workspace workspace, Stream stream);
Status cuda_weight_gradient(const WeightGradient& g, Workspace workspace, Stream stream);
size_t cuda_workspace_size(const Product& p);
size_t cuda_workspace_size(const WeightGradient& g);
Status prepare_cuda(Device device);

// The workspace for a caller who has a tensor: what a query of blocksparse/conv.h says of an x (or dx) of its dtype,
// shape, strides and device. The data is not read. A tensor of both memory formats (one pixel, or one channel) counts
// as channels-last, which never needs less. Returns 0 if x does not fit the convolution.
using WorkspaceSize = size_t(const ConvProblem&, Device);
size_t workspace_size_like(const Convolution& conv, const ConstTensor& x, WorkspaceSize* size);

// The name of the way that does a call: see cuda/select.h.
Result<std::string> cuda_choice(const Product& p);
Result<std::string> cuda_choice(const WeightGradient& g);

}  // namespace blocksparse::conv
