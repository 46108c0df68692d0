// The gradients of a block-sparse linear layer in C++, and what they must fulfil.
#include <blocksparse/blocksparse.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

namespace bs = blocksparse;

// [readme]
// dx = dy W, and dW = dy^T x of the blocks. x [n, in], dy [n, out], w and dw [blocks, b, b].
bs::Status gradients(const bs::Layout& layout, bs::ConstTensor x, bs::ConstTensor dy, bs::ConstTensor w, bs::Tensor dx,
                     bs::Tensor dw) {
  const bs::LinearProblem problem{.layout = layout, .dtype = x.dtype, .n = x.shape[0]};
  std::vector<char> memory(
      std::max(bs::linear_dgrad_workspace_size(problem), bs::linear_wgrad_workspace_size(problem)));
  const bs::Workspace workspace{memory.data(), memory.size()};
  if (bs::Status status = bs::linear_dgrad(layout, dy, w, dx, workspace); !status.ok()) return status;
  const bs::GradPair pair{x, dy};
  return bs::linear_wgrad(layout, {&pair, 1}, {}, bs::Accumulate::no, dw, workspace);
}
// [readme]

namespace {

int fail(const bs::Status& status) {
  std::fprintf(stderr, "%s\n", status.message().c_str());
  return 1;
}

}  // namespace

int main() {
  const auto layout = bs::Layout::from_graph("ba(64,4)", {.block_size = 16});
  if (!layout.ok()) return fail(layout.status());

  const int64_t n = 10, b = layout->block_size(), in = layout->in_features(), out = layout->out_features();
  std::vector<float> x(n * in), w(layout->blocks() * b * b), y(n * out), dx(x.size()), dw(w.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  for (size_t i = 0; i < w.size(); ++i) w[i] = 0.01f * std::cos(static_cast<float>(i));
  const bs::ConstTensor x_of(x.data(), bs::DType::f32, {n, in}), dy(y.data(), bs::DType::f32, {n, out}),
      weights(w.data(), bs::DType::f32, {layout->blocks(), b, b});

  std::vector<char> memory(bs::linear_fprop_workspace_size({*layout, bs::DType::f32, n}));
  bs::Status status = bs::linear_fprop(*layout, x_of, weights, {}, {y.data(), bs::DType::f32, {n, out}},
                                       {memory.data(), memory.size()});
  if (!status.ok()) return fail(status);
  // With y = x W^T for dy.
  status = gradients(*layout, x_of, dy, weights, {dx.data(), bs::DType::f32, {n, in}},
                     {dw.data(), bs::DType::f32, {layout->blocks(), b, b}});
  if (!status.ok()) return fail(status);

  const auto product = [](const std::vector<float>& a, const std::vector<float>& c) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * c[i];
    return sum;
  };
  const double yy = product(y, y), of_x = product(dx, x), of_w = product(dw, w);
  std::printf("<y, y> = %.6f, <dx, x> = %.6f, <dW, W> = %.6f\n", yy, of_x, of_w);
  return std::max(std::abs(yy - of_x), std::abs(yy - of_w)) < 1e-4 * yy ? 0 : 1;
}
