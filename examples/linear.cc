// A block-sparse linear layer in C++: y = relu(x W^T).
// [readme]
#include <blocksparse/blocksparse.h>

#include <cstdio>
#include <vector>

namespace bs = blocksparse;

int main() {
  const auto layout = bs::Layout::from_graph("ba(64,4)", {.block_size = 16});  // 1024 x 1024, 13.6 % of the blocks
  if (!layout.ok()) return std::fprintf(stderr, "%s\n", layout.status().message().c_str()), 1;

  const int64_t n = 32, b = layout->block_size(), in = layout->in_features(), out = layout->out_features();
  const std::vector<float> x(n * in, 1.0f), w(layout->blocks() * b * b, 0.01f);
  std::vector<float> y(n * out);
  std::vector<char> workspace(bs::linear_fprop_workspace_size({*layout, bs::DType::f32, n}));

  const bs::Status status = bs::linear_fprop(
      *layout, {x.data(), bs::DType::f32, {n, in}}, bs::ConstTensor{w.data(), bs::DType::f32, {layout->blocks(), b, b}},
      {.activation = bs::Activation::relu}, {y.data(), bs::DType::f32, {n, out}}, {workspace.data(), workspace.size()});
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.message().c_str()), 1;
  std::printf("%s\ny[0, 0] = %g\n", layout->describe().c_str(), y[0]);
}
// [readme]
