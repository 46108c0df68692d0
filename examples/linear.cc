// A block-sparse linear layer in C++: y = relu(x W^T).
// [readme]
#include <blocksparse/blocksparse.h>

#include <cstdio>
#include <vector>

namespace bs = blocksparse;

int main() {
  const auto layout = bs::Layout::from_graph("ba(64,4)", {.block_size = 16});  // 1024 x 1024, 13.6 % of the blocks
  if (!layout.ok()) return std::puts(layout.status().message().c_str()), 1;
  constexpr auto f32 = bs::DType::f32;
  std::vector<float> x(32 * 1024, 1.0f), w(layout->blocks() * 16 * 16, 0.01f), y(32 * 1024);
  std::vector<char> workspace(bs::linear_fprop_workspace_size({*layout, f32, 32}));
  const bs::Status status = bs::linear_fprop(
      *layout, {x.data(), f32, {32, 1024}}, bs::Tensor{w.data(), f32, {layout->blocks(), 16, 16}},
      {.activation = bs::Activation::relu}, {y.data(), f32, {32, 1024}}, {workspace.data(), workspace.size()});
  if (!status.ok()) return std::puts(status.message().c_str()), 1;
  std::printf("%s\ny[0, 0] = %g\n", layout->describe().c_str(), y[0]);
}
// [readme]
