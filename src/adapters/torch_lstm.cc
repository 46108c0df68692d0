// The LSTM's kernels. Arguments are in the order of the schemas in python/blocksparse/torch/ops/lstm.py. Checks and
// shapes of results are those of that file, too.
#include <algorithm>

#include "adapters/torch_api.h"
#include "core/text.h"

namespace blocksparse::pytorch {

namespace {

constexpr const char* kOp = "lstm";

const int64_t* lengths_of(const TensorHandle& lengths, int64_t n) {
  if (!lengths.given()) return nullptr;
  const auto shape = lengths.sizes();
  if (lengths.dtype() != api.int64_code || shape.size() != 1 || shape[0] != n || (n > 1 && lengths.strides()[0] != 1)) {
    raise(
        invalid("[lstm] lengths are ", dtype_name(lengths.dtype()), " ", sizes_text(shape), ", needs int64 [", n, "]"));
  }
  return static_cast<const int64_t*>(lengths.data());
}

std::span<const int64_t> shape_of_blocks(const TensorHandle& values) {
  const auto shape = values.sizes();
  if (shape.size() != 3) raise(invalid("[lstm] values are ", sizes_text(shape), ", needs [blocks, b, b]"));
  return shape;
}

LayoutView view_of(const TensorHandle& index, const TensorHandle& values, int64_t hidden) {
  const auto shape = shape_of_blocks(values);
  const auto b = static_cast<int32_t>(std::clamp<int64_t>(shape[1], 0, 256));
  return pytorch::view_of(kOp, index, false, {b, times(4, hidden), hidden, shape[0]});
}

void forward(Word* stack, uint64_t, uint64_t) {
  const TensorHandle pre(stack[0]), values(stack[1]), index(stack[2]);
  const TensorHandle h0 = take_optional(stack[3]), c0 = take_optional(stack[4]), lengths = take_optional(stack[5]);
  const bool save = flag(stack[6]);

  const auto shape = pre.sizes();
  if (shape.size() != 4 || shape[2] != 4) {
    raise(invalid("[lstm] pre is ", sizes_text(shape), ", needs [steps, n, 4, hidden]"));
  }
  shape_of_blocks(values);
  check_devices(kOp, pre, {&values, &index, &h0, &c0, &lengths});
  const Tensor x = pre.view(kOp);
  const int64_t steps = shape[0], n = shape[1], hidden = shape[3], kept = save ? steps : 0;
  const int32_t code = code_of(x.dtype), state_code = code_of(sum_dtype(x.dtype));
  TensorHandle made[] = {
      empty_contiguous({{steps, n, hidden}}, code, x.device), empty_contiguous({{n, hidden}}, code, x.device),
      empty_contiguous({{n, hidden}}, state_code, x.device), empty_contiguous({{kept, n, 4, hidden}}, code, x.device),
      empty_contiguous({{kept, n, hidden}}, state_code, x.device)};
  const LayoutView layout = view_of(index, values, hidden);
  const LstmProblem problem{.layout = layout, .dtype = x.dtype, .steps = steps, .n = n};
  with_workspace(lstm_forward_workspace_size(problem, x.device), x.device, [&](Workspace workspace) {
    LstmOutputs out{made[0].view(kOp), made[1].view(kOp), made[2].view(kOp), {}, {}};
    if (save) {
      out.gates = made[3].view(kOp);
      out.cells = made[4].view(kOp);
    }
    require(lstm_forward(layout, {x, values.view(kOp), h0.view(kOp), c0.view(kOp), lengths_of(lengths, n)}, out,
                         workspace, stream(kOp, x.device, false)));
  });
  for (size_t i = 0; i < 5; ++i) stack[i] = made[i].release();
}

void backward(Word* stack, uint64_t, uint64_t) {
  const TensorHandle values(stack[0]), index(stack[1]), y(stack[2]), gates(stack[3]), cells(stack[4]);
  const TensorHandle h0 = take_optional(stack[5]), c0 = take_optional(stack[6]), lengths = take_optional(stack[7]);
  const TensorHandle dy = take_optional(stack[8]), dh = take_optional(stack[9]), dc = take_optional(stack[10]);
  const bool wide = flag(stack[11]), weight_gradient = flag(stack[12]);

  const auto shape = y.sizes(), blocks = shape_of_blocks(values);
  if (shape.size() != 3) raise(invalid("[lstm] y is ", sizes_text(shape), ", needs [steps, n, hidden]"));
  check_devices(kOp, y, {&values, &index, &gates, &cells, &h0, &c0, &lengths, &dy, &dh, &dc});
  const Tensor yv = y.view(kOp);
  const Device device = yv.device;
  const int64_t steps = shape[0], n = shape[1], hidden = shape[2];
  const int32_t code = code_of(yv.dtype), state_code = code_of(sum_dtype(yv.dtype));
  TensorHandle dpre = empty_contiguous({{steps, n, 4, hidden}}, code, device);
  const int32_t dw_code = wide ? state_code : code;
  TensorHandle dw =
      weight_gradient ? empty_contiguous(blocks, dw_code, device) : empty_contiguous({{0}}, dw_code, device);
  TensorHandle dh0 = empty_contiguous({{h0.given() ? n : 0, hidden}}, code, device);
  TensorHandle dc0 = empty_contiguous({{c0.given() ? n : 0, hidden}}, state_code, device);
  const LayoutView layout = view_of(index, values, hidden);
  const LstmProblem problem{.layout = layout, .dtype = yv.dtype, .steps = steps, .n = n};
  with_workspace(lstm_backward_workspace_size(problem, device), device, [&](Workspace workspace) {
    const LstmSaved saved{values.view(kOp), h0.view(kOp),   c0.view(kOp), lengths_of(lengths, n), yv,
                          gates.view(kOp),  cells.view(kOp)};
    const LstmGrads grads{dpre.view(kOp), weight_gradient ? dw.view(kOp) : Tensor(),
                          h0.given() ? dh0.view(kOp) : Tensor(), c0.given() ? dc0.view(kOp) : Tensor()};
    require(lstm_backward(layout, saved, {dy.view(kOp), dh.view(kOp), dc.view(kOp)}, Accumulate::no, grads, workspace,
                          stream(kOp, device, false)));
  });
  stack[0] = dpre.release();
  stack[1] = dw.release();
  stack[2] = dh0.release();
  stack[3] = dc0.release();
}

constexpr Row kKernels[] = {{"lstm_forward", forward}, {"lstm_backward", backward}};

}  // namespace

std::span<const Row> lstm_kernels() { return kKernels; }

}  // namespace blocksparse::pytorch
