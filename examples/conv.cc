// A block-sparse convolution in C++, strided, and the transposed one that takes it back.
#include <blocksparse/blocksparse.h>

#include <cmath>
#include <cstdio>
#include <vector>

namespace bs = blocksparse;

// [readme]
// y [n, out channels, size / 2...] of x [n, in channels, size...], both contiguous: 3 x 3, stride 2, and a bias.
bs::Status halve(const bs::Layout& layout, bs::ConstTensor x, bs::ConstTensor w, bs::ConstTensor bias, bs::Tensor y) {
  const bs::Convolution conv{
      .layout = layout,
      .geometry = {.kernel = {3, 3}, .stride = {2, 2}, .padding_before = {1, 1}, .padding_after = {1, 1}}};
  const bs::ConvProblem problem{
      .conv = conv, .dtype = x.dtype, .n = x.shape[0], .size = {x.shape[2], x.shape[3]}, .channels_last = false};
  std::vector<char> workspace(bs::conv_fprop_workspace_size(problem));
  return bs::conv_fprop(conv, x, w, {.bias = bias}, y, {workspace.data(), workspace.size()});
}
// [readme]

int main() {
  const auto layout =
      bs::Layout::from_graph("random(4,3,0.5)", {.block_size = 8});  // 24 channels to 32, half of the blocks
  if (!layout.ok()) {
    std::fprintf(stderr, "%s\n", layout.status().message().c_str());
    return 1;
  }
  const int64_t n = 2, b = layout->block_size(), in = layout->in_features(), out = layout->out_features();
  std::vector<float> x(n * in * 8 * 8), y(n * out * 4 * 4), w(layout->blocks() * 9 * b * b), bias(out);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  for (size_t i = 0; i < w.size(); ++i) w[i] = 0.1f * std::cos(static_cast<float>(i));
  const bs::ConstTensor values(w.data(), bs::DType::f32, {layout->blocks(), 9, b, b});
  const bs::ConstTensor images(x.data(), bs::DType::f32, {n, in, 8, 8});
  const bs::Tensor halved(y.data(), bs::DType::f32, {n, out, 4, 4});
  if (const bs::Status status = halve(*layout, images, values, {bias.data(), bs::DType::f32, {out}}, halved);
      !status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }

  // The transposed convolution over W^T of the same values is the gradient of x.
  const bs::ConvGeometry back{.transposed = true,
                              .kernel = {3, 3},
                              .stride = {2, 2},
                              .padding_before = {1, 1},
                              .padding_after = {1, 1},
                              .output_padding = {1, 1}};
  const bs::Convolution conv{.layout = layout->t(), .geometry = back};
  std::vector<float> dx(x.size());
  std::vector<char> workspace(bs::conv_fprop_workspace_size(
      {.conv = conv, .dtype = bs::DType::f32, .n = n, .size = {4, 4}, .channels_last = false}));
  const bs::Status status = bs::conv_fprop(conv, halved, values, {}, {dx.data(), bs::DType::f32, {n, in, 8, 8}},
                                           {workspace.data(), workspace.size()});
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }

  double product = 0, gradient = 0;  // <y, y> = <dx, x>, the bias being 0
  for (float value : y) product += static_cast<double>(value) * value;
  for (size_t i = 0; i < x.size(); ++i) gradient += static_cast<double>(dx[i]) * x[i];
  std::printf("%s\n<y, y> = %.6f, <dx, x> = %.6f\n", layout->describe().c_str(), product, gradient);
  return std::abs(product - gradient) < 1e-4 * product ? 0 : 1;
}
