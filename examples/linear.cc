// A block-sparse linear layer in C++: forward, and both gradients.
#include <blocksparse/blocksparse.h>

#include <cmath>
#include <cstdio>
#include <vector>

// [readme]
namespace bs = blocksparse;

bs::Status forward(const bs::Layout& layout, const std::vector<float>& x, const std::vector<float>& w, int64_t n,
                   std::vector<float>& y) {
  const int64_t b = layout.block_size();
  y.resize(n * layout.out_features());
  std::vector<char> workspace(bs::linear_fprop_workspace_size({layout, bs::DType::f32, n}));
  return bs::linear_fprop(layout, {x.data(), bs::DType::f32, {n, layout.in_features()}},
                          bs::ConstTensor{w.data(), bs::DType::f32, {layout.blocks(), b, b}},
                          {.activation = bs::Activation::relu}, {y.data(), bs::DType::f32, {n, layout.out_features()}},
                          {workspace.data(), workspace.size()});
}
// [readme]

int main() {
  const auto layout = bs::Layout::from_graph("ba(64,4)", {.block_size = 16});  // a scale-free graph of 64 x 64 blocks
  if (!layout.ok()) {
    std::fprintf(stderr, "%s\n", layout.status().message().c_str());
    return 1;
  }
  const int64_t n = 10, b = layout->block_size();
  std::vector<float> x(n * layout->in_features()), w(layout->blocks() * b * b), y;
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  for (size_t i = 0; i < w.size(); ++i) w[i] = 0.01f * std::cos(static_cast<float>(i));
  if (const bs::Status status = forward(*layout, x, w, n, y); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }

  // dx = dy W and dW = dy^T x, with y for dy.
  std::vector<float> dx(x.size()), dw(w.size());
  const bs::ConstTensor dy(y.data(), bs::DType::f32, {n, layout->out_features()});
  const bs::LinearProblem problem{.layout = *layout, .dtype = bs::DType::f32, .n = n};
  std::vector<char> workspace(
      std::max(bs::linear_dgrad_workspace_size(problem), bs::linear_wgrad_workspace_size(problem)));
  const bs::GradPair pair{{x.data(), bs::DType::f32, {n, layout->in_features()}}, dy};
  const bs::Status dgrad =
      bs::linear_dgrad(*layout, dy, bs::ConstTensor{w.data(), bs::DType::f32, {layout->blocks(), b, b}},
                       {dx.data(), bs::DType::f32, {n, layout->in_features()}}, {workspace.data(), workspace.size()});
  const bs::Status wgrad = bs::linear_wgrad(*layout, {&pair, 1}, {}, bs::Accumulate::no,
                                            bs::Tensor{dw.data(), bs::DType::f32, {layout->blocks(), b, b}},
                                            {workspace.data(), workspace.size()});
  if (!dgrad.ok() || !wgrad.ok()) return 1;

  double product = 0, gradient = 0;  // <y, y> = <dx, x> = <dw, w>, because relu keeps y where it is not 0
  for (float value : y) product += static_cast<double>(value) * value;
  for (size_t i = 0; i < w.size(); ++i) gradient += static_cast<double>(dw[i]) * w[i];
  std::printf("%s\n<y, y> = %.6f, <dW, W> = %.6f\n", layout->describe().c_str(), product, gradient);
  return std::abs(product - gradient) < 1e-4 * product ? 0 : 1;
}
