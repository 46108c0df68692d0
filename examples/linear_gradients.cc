// The gradients of a block-sparse linear layer in C++, and what they must fulfil.
#include <blocksparse/blocksparse.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

namespace bs = blocksparse;

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

  const bs::LinearProblem problem{.layout = *layout, .dtype = bs::DType::f32, .n = n};
  std::vector<char> memory(std::max({bs::linear_fprop_workspace_size(problem), bs::linear_dgrad_workspace_size(problem),
                                     bs::linear_wgrad_workspace_size(problem)}));
  const bs::Workspace workspace{memory.data(), memory.size()};

  // y = x W^T; dx = dy W and dW = dy^T x, with y for dy.
  bs::Status status = bs::linear_fprop(*layout, x_of, weights, {}, {y.data(), bs::DType::f32, {n, out}}, workspace);
  if (!status.ok()) return fail(status);
  status = bs::linear_dgrad(*layout, dy, weights, {dx.data(), bs::DType::f32, {n, in}}, workspace);
  if (!status.ok()) return fail(status);
  const bs::GradPair pair{x_of, dy};
  status = bs::linear_wgrad(*layout, {&pair, 1}, {}, bs::Accumulate::no,
                            bs::Tensor{dw.data(), bs::DType::f32, {layout->blocks(), b, b}}, workspace);
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
