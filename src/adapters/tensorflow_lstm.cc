// The LSTM on TensorFlow's tensors: all steps in one call. What the backward pass needs is a further result.
#include "adapters/tensorflow_api.h"
#include "core/text.h"

namespace blocksparse::tensorflow {

namespace {

constexpr const char* kOp = "lstm";

const int64_t* lengths_of(const TensorHandle& lengths, int64_t n) {
  if (!lengths.given()) return nullptr;
  const std::vector<int64_t> sizes = lengths.sizes();
  if (sizes.size() != 1 || sizes[0] != n) {
    throw Failure{kInvalidArgument, concat("[lstm] lengths are ", sizes_text(sizes), ", needs [", n, "]")};
  }
  return static_cast<const int64_t*>(lengths.data());
}

void forward(const Attributes& attributes, Call& call) {
  const TensorHandle pre = call.next_input(), values = call.next_input(), index = call.next_input(),
                     h0 = call.next_input(), c0 = call.next_input();
  const TensorHandle lengths = call.next_optional(attributes.lengths);
  const bs_layout_view layout = layout_view(index, false);
  const std::vector<int64_t> shape = pre.sizes();
  if (shape.size() != 4 || shape[2] != 4) {
    throw Failure{kInvalidArgument, concat("[lstm] pre is ", sizes_text(shape), ", needs [steps, n, 4, hidden]")};
  }
  const int64_t steps = shape[0], n = shape[1], hidden = shape[3];
  const int32_t dtype = pre.dtype(), sums = sum_dtype_of(dtype);
  const TensorHandle y = call.output(0, dtype, {{steps, n, hidden}}), h = call.output(1, dtype, {{n, hidden}}),
                     c = call.output(2, sums, {{n, hidden}}), gates = call.output(3, dtype, {{steps, n, 4, hidden}}),
                     cells = call.output(4, sums, {{steps, n, hidden}});
  const bs_tensor prev = view(pre, kOp), w = view(values, kOp), yv = view(y, kOp), hv = view(h, kOp), cv = view(c, kOp),
                  gv = view(gates, kOp), cells_view = view(cells, kOp), h0v = view(h0, kOp), c0v = view(c0, kOp);
  const bs_lstm_outputs outputs{&yv, &hv, &cv, &gv, &cells_view};
  with_workspace(call, bs_lstm_forward_workspace_size(&layout, prev.dtype, steps, n), [&](bs_workspace workspace) {
    require(bs_lstm_forward(&layout, &prev, &w, &h0v, &c0v, lengths_of(lengths, n), &outputs, workspace, stream()));
  });
}

void backward(const Attributes& attributes, Call& call) {
  call.next_input();  // pre, which only derivatives of this are functions of
  const TensorHandle values = call.next_input(), index = call.next_input(), y = call.next_input(),
                     gates = call.next_input(), cells = call.next_input(), dy = call.next_input(),
                     dh = call.next_input(), dc = call.next_input(), h0 = call.next_input(), c0 = call.next_input();
  const TensorHandle lengths = call.next_optional(attributes.lengths);
  const bs_layout_view layout = layout_view(index, false);
  const std::vector<int64_t> shape = y.sizes();
  if (shape.size() != 3) {
    throw Failure{kInvalidArgument, concat("[lstm] y is ", sizes_text(shape), ", needs [steps, n, hidden]")};
  }
  const int64_t steps = shape[0], n = shape[1], hidden = shape[2], b = layout.block_size;
  const int32_t dtype = y.dtype(), sums = sum_dtype_of(dtype);
  const TensorHandle dpre = call.output(0, dtype, {{steps, n, 4, hidden}}),
                     dw = call.output(1, dtype, {{layout.blocks, b, b}}), dh0 = call.output(2, dtype, {{n, hidden}}),
                     dc0 = call.output(3, sums, {{n, hidden}});
  const bs_tensor w = view(values, kOp), yv = view(y, kOp), gv = view(gates, kOp), cells_view = view(cells, kOp),
                  dyv = view(dy, kOp), dhv = view(dh, kOp), dcv = view(dc, kOp), dprev = view(dpre, kOp),
                  dwv = view(dw, kOp), dh0v = view(dh0, kOp), dc0v = view(dc0, kOp), h0v = view(h0, kOp),
                  c0v = view(c0, kOp);
  const bs_lstm_saved saved{&w, &h0v, &c0v, lengths_of(lengths, n), &yv, &gv, &cells_view};
  const bs_lstm_grads grads{&dprev, &dwv, &dh0v, &dc0v};
  with_workspace(call, bs_lstm_backward_workspace_size(&layout, yv.dtype, steps, n), [&](bs_workspace workspace) {
    require(bs_lstm_backward(&layout, &saved, &dyv, &dhv, &dcv, 0, &grads, workspace, stream()));
  });
}

}  // namespace

std::vector<Op> lstm_ops() {
  const std::vector<const char*> attributes = {kType, "S: {float, double}", "length_count: int >= 0"};
  return {{.name = "BlocksparseLstm",
           .inputs = {"pre: T", "values: T", "index: int32", "h0: T", "c0: S", "lengths: length_count * int64"},
           .outputs = {"y: T", "h: T", "c: S", "gates: T", "cells: S"},
           .attributes = attributes,
           .compute = compute<forward>},
          {.name = "BlocksparseLstmGradient",
           .inputs = {"pre: T", "values: T", "index: int32", "y: T", "gates: T", "cells: S", "dy: T", "dh: T", "dc: S",
                      "h0: T", "c0: S", "lengths: length_count * int64"},
           .outputs = {"dpre: T", "dw: T", "dh0: T", "dc0: S"},
           .attributes = attributes,
           .compute = compute<backward>}};
}

}  // namespace blocksparse::tensorflow
