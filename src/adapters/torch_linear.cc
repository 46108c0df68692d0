// The linear op's kernels. Arguments are in the order of the schemas in python/blocksparse/torch/ops/linear.py.
#include <algorithm>
#include <array>

#include "adapters/torch_api.h"
#include "core/text.h"

namespace blocksparse::pytorch {

namespace {

constexpr const char* kOp = "linear";

// A new tensor [..., features], features-first if x is. The rule is that of features_first in ops/calls.py.
TensorHandle empty_like(const Tensor& x, int64_t features) {
  if (x.rank == 2 && x.stride[0] == 1 && x.stride[1] != 1 && x.shape[0] > 1) {
    return empty({{x.shape[0], features}}, {{1, x.shape[0]}}, code_of(x.dtype), x.device);
  }
  std::array<int64_t, kMaxRank> sizes = x.shape;
  const auto rank = static_cast<size_t>(x.rank);
  if (rank > 0) sizes[rank - 1] = features;
  return empty_contiguous({sizes.data(), rank}, code_of(x.dtype), x.device);
}

int64_t width_of(const ConstTensor& x) { return x.rank > 0 ? x.shape[static_cast<size_t>(x.rank) - 1] : 0; }

int64_t tokens_of(const ConstTensor& x) {
  int64_t n = 1;
  for (int32_t i = 0; i + 1 < x.rank; ++i) n *= x.shape[static_cast<size_t>(i)];
  return n;
}

// The number of blocks of W and the size b of one.
std::array<int64_t, 2> blocks_of(const ConstTensor& values) {
  if (values.rank == 3) return {values.shape[0], values.shape[1]};
  raise(invalid("[linear] values have ", values.rank, " dimensions, needs [blocks, b, b]"));
}

LayoutView view_of(const TensorHandle& index, bool transposed, const std::array<int64_t, 2>& blocks,
                   int64_t out_features, int64_t in_features) {
  const auto b = static_cast<int32_t>(std::clamp<int64_t>(blocks[1], 0, 256));
  return pytorch::view_of(kOp, index, transposed, {b, out_features, in_features, blocks[0]});
}

Word product(const TensorHandle& index, bool transposed, const TensorHandle& x, int64_t out_features, const Weights& w,
             const Epilogue& epilogue, bool tf32) {
  const Tensor xv = x.view(kOp);
  const LayoutView layout = view_of(index, transposed, blocks_of(w.values), out_features, width_of(xv));
  TensorHandle y = empty_like(xv, out_features);
  const size_t bytes = linear_fprop_workspace_size({layout, xv.dtype, tokens_of(xv)}, xv.device);
  with_workspace(bytes, xv.device, [&](Workspace workspace) {
    require(linear_fprop(layout, xv, w, epilogue, y.view(kOp), workspace, stream(kOp, xv.device, tf32)));
  });
  return y.release();
}

void linear(Word* stack, uint64_t, uint64_t) {
  const TensorHandle x(stack[0]), values(stack[1]), index(stack[2]), bias = take_optional(stack[3]);
  const auto out_features = static_cast<int64_t>(stack[4]);
  stack[0] =
      product(index, false, x, out_features, values.view(kOp), {bias.view(kOp), {}, Activation::none}, flag(stack[5]));
}

void fprop(Word* stack, uint64_t, uint64_t) {
  const TensorHandle x(stack[0]), values(stack[1]), index(stack[2]);
  const auto out_features = static_cast<int64_t>(stack[3]);
  const bool transposed = flag(stack[4]), tf32 = flag(stack[9]);
  const TensorHandle bias = take_optional(stack[5]), residual = take_optional(stack[6]),
                     gates = take_optional(stack[7]);
  const auto activation = static_cast<Activation>(stack[8]);
  stack[0] = product(index, transposed, x, out_features, {values.view(kOp), gates.view(kOp)},
                     {bias.view(kOp), residual.view(kOp), activation}, tf32);
}

void dgrad(Word* stack, uint64_t, uint64_t) {
  const TensorHandle dy(stack[0]), values(stack[1]), index(stack[2]);
  const auto in_features = static_cast<int64_t>(stack[3]);
  const bool transposed = flag(stack[4]), tf32 = flag(stack[6]);
  const TensorHandle gates = take_optional(stack[5]);
  const Tensor dyv = dy.view(kOp), w = values.view(kOp);
  const LayoutView layout = view_of(index, transposed, blocks_of(w), width_of(dyv), in_features);
  TensorHandle dx = empty_like(dyv, in_features);
  const size_t bytes = linear_dgrad_workspace_size({layout, dyv.dtype, tokens_of(dyv)}, dyv.device);
  with_workspace(bytes, dyv.device, [&](Workspace workspace) {
    const Stream on = stream(kOp, dyv.device, tf32);
    require(linear_dgrad(layout, dyv, {w, gates.view(kOp)}, dx.view(kOp), workspace, on));
  });
  stack[0] = dx.release();
}

void wgrad(Word* stack, uint64_t, uint64_t) {
  const TensorHandle x(stack[0]), dy(stack[1]), index(stack[2]);
  const auto blocks = static_cast<int64_t>(stack[3]), b = static_cast<int64_t>(stack[4]);
  const bool transposed = flag(stack[5]), wide = flag(stack[6]);
  const TensorHandle values = take_optional(stack[7]), gates = take_optional(stack[8]);
  const bool gate_gradient = flag(stack[9]), tf32 = flag(stack[10]);
  const GradPair pair{x.view(kOp), dy.view(kOp)};
  const Device device = pair.x.device;
  const LayoutView layout = view_of(index, transposed, {blocks, b}, width_of(pair.dy), width_of(pair.x));
  const DType sums = sum_dtype(pair.x.dtype);
  TensorHandle dw = empty_contiguous({{blocks, b, b}}, code_of(wide ? sums : pair.x.dtype), device);
  TensorHandle dgates = empty_contiguous({{gate_gradient ? blocks : 0}}, code_of(sums), device);
  const size_t bytes = linear_wgrad_workspace_size({layout, pair.x.dtype, tokens_of(pair.x)}, device);
  with_workspace(bytes, device, [&](Workspace workspace) {
    require(linear_wgrad(layout, {&pair, 1}, {values.view(kOp), gates.view(kOp)}, Accumulate::no,
                         {dw.view(kOp), gate_gradient ? dgates.view(kOp) : Tensor()}, workspace,
                         stream(kOp, device, tf32)));
  });
  stack[0] = dw.release();
  stack[1] = dgates.release();
}

void bias(Word* stack, uint64_t, uint64_t) {
  constexpr const char* op = "bias_gradient";
  const TensorHandle dy(stack[0]);
  const Tensor view = dy.view(op);
  TensorHandle dbias = empty_contiguous({{width_of(view)}}, code_of(view.dtype), view.device);
  with_workspace(bias_gradient_workspace_size(view), view.device, [&](Workspace workspace) {
    require(bias_gradient(view, dbias.view(op), workspace, stream(op, view.device, false)));
  });
  stack[0] = dbias.release();
}

constexpr Row kKernels[] = {{"linear", linear},
                            {"linear_fprop", fprop},
                            {"linear_dgrad", dgrad},
                            {"linear_wgrad", wgrad},
                            {"bias_gradient", bias}};

}  // namespace

std::span<const Row> linear_kernels() { return kKernels; }

}  // namespace blocksparse::pytorch
