// The kernels of gated linear units. Arguments are in the order of the schemas in python/blocksparse/torch/ops/glu.py.
#include <algorithm>
#include <array>

#include "adapters/torch_api.h"
#include "core/text.h"

namespace blocksparse::pytorch {

namespace {

constexpr const char* kOp = "linear_glu";

int64_t last_of(const ConstTensor& x) { return x.rank > 0 ? x.shape[static_cast<size_t>(x.rank) - 1] : 0; }

// A new contiguous tensor [..., features].
TensorHandle empty_like(const ConstTensor& x, int64_t features) {
  std::array<int64_t, kMaxRank> sizes = x.shape;
  const auto rank = static_cast<size_t>(x.rank);
  if (rank > 0) sizes[rank - 1] = features;
  return empty_contiguous({sizes.data(), rank}, code_of(x.dtype), x.device);
}

void linear_glu(Word* stack, uint64_t, uint64_t) {
  const TensorHandle x(stack[0]), values(stack[1]), index(stack[2]);
  const auto out_features = static_cast<int64_t>(stack[3]), hidden = static_cast<int64_t>(stack[4]);
  const bool transposed = flag(stack[5]), tf32 = flag(stack[9]);
  const TensorHandle bias = take_optional(stack[6]), gates = take_optional(stack[7]);
  const auto activation = static_cast<Activation>(stack[8]);
  const Tensor xv = x.view(kOp), w = values.view(kOp);
  if (w.rank != 3) raise(invalid("[linear_glu] values have ", w.rank, " dimensions, needs [blocks, b, b]"));
  const auto b = static_cast<int32_t>(std::clamp<int64_t>(w.shape[1], 0, 256));
  const LayoutView layout = view_of(kOp, index, transposed, {b, out_features, last_of(xv), w.shape[0]});
  int64_t n = 1;
  for (int32_t i = 0; i + 1 < xv.rank; ++i) n *= xv.shape[static_cast<size_t>(i)];
  TensorHandle y = empty_like(xv, hidden);
  const size_t bytes = linear_glu_fprop_workspace_size({layout, xv.dtype, n}, xv.device);
  with_workspace(bytes, xv.device, [&](Workspace workspace) {
    require(linear_glu_fprop(layout, xv, {w, gates.view(kOp)}, {bias.view(kOp), {}, activation}, y.view(kOp), workspace,
                             stream(kOp, xv.device, tf32)));
  });
  stack[0] = y.release();
}

void forward(Word* stack, uint64_t, uint64_t) {
  const TensorHandle z(stack[0]);
  const Tensor zv = z.view("glu");
  TensorHandle y = empty_like(zv, static_cast<int64_t>(stack[1]));
  const auto activation = static_cast<Activation>(stack[2]);
  require(glu_forward(zv, activation, y.view("glu"), stream("glu", zv.device, false)));
  stack[0] = y.release();
}

void backward(Word* stack, uint64_t, uint64_t) {
  const TensorHandle z(stack[0]), dy(stack[1]);
  const Tensor zv = z.view("glu");
  TensorHandle dz = empty_like(zv, last_of(zv));
  const auto activation = static_cast<Activation>(stack[2]);
  require(glu_backward(zv, dy.view("glu"), activation, dz.view("glu"), stream("glu", zv.device, false)));
  stack[0] = dz.release();
}

constexpr Row kKernels[] = {{"linear_glu", linear_glu}, {"glu", forward}, {"glu_backward", backward}};

}  // namespace

std::span<const Row> glu_kernels() { return kKernels; }

}  // namespace blocksparse::pytorch
