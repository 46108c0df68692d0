// A call of the linear op, for tests of its edge and of what it promises.
#pragma once

#include <vector>

#include "blocksparse/blocksparse.h"

namespace blocksparse::linear {

// A valid call that a test spoils in one place.
struct Call {
  Layout layout = *Layout::from_graph("random(4,3,0.5)", {.block_size = 16, .out_features = 60, .in_features = 0}, 1);
  std::vector<float> memory = std::vector<float>(1 << 16, 1.0f);
  std::vector<char> scratch = std::vector<char>(1 << 20);
  ConstTensor x{memory.data(), DType::f32, {5, 48}};
  ConstTensor dy{memory.data() + 1024, DType::f32, {5, 60}};
  ConstTensor w{memory.data() + 2048, DType::f32, {layout.blocks(), 16, 16}};
  ConstTensor gates{memory.data() + 16384, DType::f32, {layout.blocks()}};
  Tensor y{memory.data() + 32768, DType::f32, {5, 60}};
  Tensor dx{memory.data() + 33792, DType::f32, {5, 48}};
  Tensor dw{memory.data() + 34816, DType::f32, {layout.blocks(), 16, 16}};
  Tensor dgates{memory.data() + 49152, DType::f32, {layout.blocks()}};
  Epilogue epilogue;
  Workspace workspace{scratch.data(), scratch.size()};
  Stream stream;

  Status fprop() const { return linear_fprop(layout, x, {w, gates}, epilogue, y, workspace, stream); }
  Status dgrad() const { return linear_dgrad(layout, dy, {w, gates}, dx, workspace, stream); }
  Status wgrad() const {
    const GradPair pair{x, dy};
    return linear_wgrad(layout, {&pair, 1}, {w, gates}, Accumulate::no, {dw, dgates}, workspace, stream);
  }
};

}  // namespace blocksparse::linear
