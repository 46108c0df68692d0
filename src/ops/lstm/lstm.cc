// The edge of the LSTM op: it checks a call once, then hands it to a device.
#include "ops/lstm/lstm.h"

#include "blocksparse/blocksparse.h"
#include "core/checked_tensors.h"
#include "cpu/threads.h"

namespace blocksparse {

using namespace lstm;  // NOLINT(google-build-using-namespace)

namespace lstm {

Status check_lengths(const char* op, Device device, const int64_t* lengths, int64_t n, int64_t steps) {
  if (device.type != DeviceType::cpu || lengths == nullptr) return {};
  for (int64_t i = 0; i < n; ++i) {
    if (lengths[i] < 0 || lengths[i] > steps) {
      return invalid("[", op, "] lengths[", i, "] is ", lengths[i], ", needs 0 to ", steps);
    }
  }
  return {};
}

}  // namespace lstm

namespace {

using Tensors = CheckedTensors<9>;

constexpr int64_t kMostRows = int64_t{1} << 40;  // steps * n: more do not fit into any memory

Status check_shape(const char* op, const LayoutView& layout) {
  if (layout.transposed) return invalid("[", op, "] layout is transposed, needs the one of W [4 H, H]");
  const int64_t hidden = layout.in_features;
  if (layout.out_features == kGates * hidden && hidden % layout.block_size == 0) return {};
  return invalid("[", op, "] layout is ", layout.out_features, " x ", hidden, " in blocks of ", layout.block_size,
                 ", needs 4 H x H with H a multiple of the block size");
}

// `sized` names the tensor on `device` that gives the sizes.
Status check_layout(const char* op, const LayoutView& layout, const char* sized, Device device) {
  BS_RETURN_IF_ERROR(check_device_type(op, device));
  if (device.type == DeviceType::cuda) BS_RETURN_IF_ERROR(cuda_status());
  if (layout.index == nullptr) return invalid("[", op, "] layout is null");
  if (layout.device != device) {
    return invalid("[", op, "] the layout's tables are not on the device of ", sized, "; copy Layout::index() there");
  }
  return check_shape(op, layout);
}

// Takes steps and n from a tensor [steps, n, ..., H].
Status sizes_of(const char* op, const char* name, const ConstTensor& t, int rank, Sequence& s) {
  BS_RETURN_IF_ERROR(Tensors::given({op, name, t}));
  BS_RETURN_IF_ERROR(check_tensor({op, name, t}));
  if (t.rank != rank || t.shape[static_cast<size_t>(rank) - 1] != s.hidden) {
    return invalid("[", op, "] ", name, " is ", shape_text(t), ", needs [steps, n, ", rank == 4 ? "4, " : "", s.hidden,
                   "]");
  }
  s.steps = t.shape[0];
  s.n = t.shape[1];
  s.dtype = t.dtype;
  if (s.n > 0 && s.steps > kMostRows / s.n) return invalid("[", op, "] ", name, " is ", shape_text(t), ", too large");
  return {};
}

Status check_forward(const LayoutView& layout, const LstmInputs& in, const LstmOutputs& out, Forward& f) {
  const char* op = "lstm_forward";
  BS_RETURN_IF_ERROR(check_layout(op, layout, "pre", in.pre.device));
  f.layout = layout;
  f.hidden = layout.in_features;
  BS_RETURN_IF_ERROR(sizes_of(op, "pre", in.pre, 4, f));
  const int64_t hidden = f.hidden, b = layout.block_size;
  const DType dtype = f.dtype, state = sum_dtype(dtype);
  Tensors c{op, layout.device};
  BS_RETURN_IF_ERROR(c.input({c.op, "pre", in.pre}, dtype, {f.steps, f.n, kGates, hidden}));
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "w", in.w}, dtype, {layout.blocks, b, b}));
  BS_RETURN_IF_ERROR(c.input({c.op, "h0", in.h0}, dtype, {f.n, hidden}));
  BS_RETURN_IF_ERROR(c.input({c.op, "c0", in.c0}, state, {f.n, hidden}));
  BS_RETURN_IF_ERROR(c.needed_output({c.op, "y", out.y}, dtype, {f.steps, f.n, hidden}));
  BS_RETURN_IF_ERROR(c.output({c.op, "h", out.h}, dtype, {f.n, hidden}));
  BS_RETURN_IF_ERROR(c.output({c.op, "c", out.c}, state, {f.n, hidden}));
  BS_RETURN_IF_ERROR(c.output({c.op, "gates", out.gates}, dtype, {f.steps, f.n, kGates, hidden}));
  BS_RETURN_IF_ERROR(c.output({c.op, "cells", out.cells}, state, {f.steps, f.n, hidden}));
  if (out.gates.given() != out.cells.given()) return invalid("[", op, "] gates and cells are given both or neither");
  BS_RETURN_IF_ERROR(c.disjoint());
  f.lengths = in.lengths;
  BS_RETURN_IF_ERROR(check_lengths(op, layout.device, f.lengths, f.n, f.steps));
  f.w = in.w.data;
  f.h0 = in.h0.data;
  f.c0 = in.c0.data;
  f.pre = in.pre.data;
  f.y = out.y.data;
  f.h = out.h.data;
  f.c = out.c.data;
  f.gates = out.gates.data;
  f.cells = out.cells.data;
  return {};
}

Status check_backward_inputs(const LstmSaved& saved, const LstmOutputGrads& of, Backward& b, Tensors& c) {
  const int64_t hidden = b.hidden, block = b.layout.block_size;
  const DType state = sum_dtype(b.dtype);
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "w", saved.w}, b.dtype, {b.layout.blocks, block, block}));
  BS_RETURN_IF_ERROR(c.input({c.op, "h0", saved.h0}, b.dtype, {b.n, hidden}));
  BS_RETURN_IF_ERROR(c.input({c.op, "c0", saved.c0}, state, {b.n, hidden}));
  BS_RETURN_IF_ERROR(c.input({c.op, "y", saved.y}, b.dtype, {b.steps, b.n, hidden}));
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "gates", saved.gates}, b.dtype, {b.steps, b.n, kGates, hidden}));
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "cells", saved.cells}, state, {b.steps, b.n, hidden}));
  BS_RETURN_IF_ERROR(c.input({c.op, "dy", of.y}, b.dtype, {b.steps, b.n, hidden}));
  BS_RETURN_IF_ERROR(c.input({c.op, "dh", of.h}, b.dtype, {b.n, hidden}));
  BS_RETURN_IF_ERROR(c.input({c.op, "dc", of.c}, state, {b.n, hidden}));
  b.lengths = saved.lengths;
  b.w = saved.w.data;
  b.h0 = saved.h0.data;
  b.c0 = saved.c0.data;
  b.y = saved.y.data;
  b.gates = saved.gates.data;
  b.cells = saved.cells.data;
  b.dy = of.y.data;
  b.dh = of.h.data;
  b.dc = of.c.data;
  return check_lengths(c.op, c.device, b.lengths, b.n, b.steps);
}

Status check_grads(const LstmGrads& grads, Accumulate accumulate, Backward& b, Tensors& c) {
  const int64_t hidden = b.hidden, block = b.layout.block_size;
  const DType state = sum_dtype(b.dtype);
  b.dw_dtype = grads.w.dtype;
  BS_RETURN_IF_ERROR(check_gradient_dtype({c.op, "dw", grads.w}, b.dtype));
  BS_RETURN_IF_ERROR(c.needed_output({c.op, "dpre", grads.pre}, b.dtype, {b.steps, b.n, kGates, hidden}));
  BS_RETURN_IF_ERROR(c.output({c.op, "dw", grads.w}, b.dw_dtype, {b.layout.blocks, block, block}));
  BS_RETURN_IF_ERROR(c.output({c.op, "dh0", grads.h0}, b.dtype, {b.n, hidden}));
  BS_RETURN_IF_ERROR(c.output({c.op, "dc0", grads.c0}, state, {b.n, hidden}));
  b.dpre = grads.pre.data;
  b.dw = b.layout.blocks > 0 ? grads.w.data : nullptr;
  b.dh0 = grads.h0.data;
  b.dc0 = grads.c0.data;
  b.accumulate = accumulate == Accumulate::yes;
  return c.disjoint();
}

// Whether the op would take the problem.
bool is_right(const LstmProblem& p, Device device) {
  return has_tables_on(p.layout, device) && check_shape("lstm", p.layout).ok() && size_of(p.dtype) > 0 &&
         p.steps >= 0 && p.n >= 0 && (p.n == 0 || p.steps <= kMostRows / p.n);
}

size_t forward_bytes(const Sequence& s) {
  if (s.layout.device.type == DeviceType::cuda) return cuda_forward_workspace_size(s.layout, s.dtype, s.n);
  return cpu_forward_workspace_size(s.layout, s.dtype, s.n);
}

size_t backward_bytes(const Sequence& s) {
  if (s.layout.device.type == DeviceType::cuda) return cuda_backward_workspace_size(s.layout, s.dtype, s.steps, s.n);
  return cpu_backward_workspace_size(s.layout, s.dtype, s.steps, s.n);
}

template <class Size>
size_t size_for(const LstmProblem& p, Device device, Size size) {
  if (!is_right(p, device)) return 0;
  Sequence s;
  s.layout = p.layout, s.dtype = p.dtype, s.steps = p.steps, s.n = p.n, s.hidden = p.layout.in_features;
  return size(s);
}

}  // namespace

Status lstm_forward(const LayoutView& layout, const LstmInputs& in, const LstmOutputs& out, Workspace workspace,
                    Stream stream) {
  Forward f;
  BS_RETURN_IF_ERROR(check_forward(layout, in, out, f));
  BS_RETURN_IF_ERROR(check_stream("lstm_forward", stream));
  BS_RETURN_IF_ERROR(check_workspace("lstm_forward", workspace, forward_bytes(f), layout.device));
  if (layout.device.type == DeviceType::cuda) return cuda_forward(f, workspace, stream);
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  return cpu_forward(f, *isa, workspace, threads_for(stream.threads));
}

Status lstm_backward(const LayoutView& layout, const LstmSaved& saved, const LstmOutputGrads& of_outputs,
                     Accumulate accumulate, const LstmGrads& grads, Workspace workspace, Stream stream) {
  const char* op = "lstm_backward";
  Backward b;
  BS_RETURN_IF_ERROR(check_layout(op, layout, "y", saved.y.device));
  b.layout = layout;
  b.hidden = layout.in_features;
  BS_RETURN_IF_ERROR(sizes_of(op, "y", saved.y, 3, b));
  Tensors c{op, layout.device};
  BS_RETURN_IF_ERROR(check_backward_inputs(saved, of_outputs, b, c));
  BS_RETURN_IF_ERROR(check_grads(grads, accumulate, b, c));
  BS_RETURN_IF_ERROR(check_stream(op, stream));
  BS_RETURN_IF_ERROR(check_workspace(op, workspace, backward_bytes(b), layout.device));
  if (layout.device.type == DeviceType::cuda) return cuda_backward(b, workspace, stream);
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  return cpu_backward(b, *isa, workspace, threads_for(stream.threads));
}

size_t lstm_forward_workspace_size(const LstmProblem& problem, Device device) {
  return size_for(problem, device, forward_bytes);
}

size_t lstm_backward_workspace_size(const LstmProblem& problem, Device device) {
  return size_for(problem, device, backward_bytes);
}

}  // namespace blocksparse
