// The edge of the multiplicative LSTM: it checks a call once, then runs the steps.
#include "ops/sequence/multiplicative.h"

#include <algorithm>

#include "blocksparse/blocksparse.h"
#include "ops/lstm/lstm.h"

namespace blocksparse {

using namespace multiplicative;  // NOLINT(google-build-using-namespace)

namespace {

using Tensors = CheckedTensors<16>;

// Checks the layouts for the H of `s`.
Status check_layouts(const char* op, const LayoutView& layout_m, const LayoutView& layout, Sequence& s) {
  BS_RETURN_IF_ERROR(sequence::check_layout(op, "layout_m", layout_m, s.hidden, s));
  BS_RETURN_IF_ERROR(sequence::check_layout(op, "layout", layout, kGates * s.hidden, s));
  s.m.layout = layout_m;
  s.gates.layout = layout;
  return {};
}

Status check_sizes(const char* op, const MultiplicativeInputs& in, Sequence& s) {
  BS_RETURN_IF_ERROR(sequence::check_steps(op, in.factor, s));
  BS_RETURN_IF_ERROR(check_layouts(op, in.layout_m, in.layout, s));
  s.m.w = in.w_m.data;
  s.gates.w = in.w.data;
  return {};
}

Status check_inputs(const MultiplicativeInputs& in, Sequence& s, Tensors& c) {
  const DType dtype = s.dtype;
  const int64_t b_m = in.layout_m.block_size, b = in.layout.block_size;
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "factor", in.factor}, dtype, {s.steps, s.n, s.hidden}));
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "pre", in.pre}, dtype, {s.steps, s.n, kGates, s.hidden}));
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "h0", in.h0}, dtype, {s.n, s.hidden}));
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "c0", in.c0}, sum_dtype(dtype), {s.n, s.hidden}));
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "w_m", in.w_m}, dtype, {in.layout_m.blocks, b_m, b_m}));
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "w", in.w}, dtype, {in.layout.blocks, b, b}));
  s.factor = in.factor.data, s.pre = in.pre.data, s.h0 = in.h0.data, s.c0 = in.c0.data;
  s.lengths = in.lengths;
  return lstm::check_lengths(c.op, s.device, s.lengths, s.n, s.steps);
}

Status check_dw(const char* op, const char* name, const Tensor& dw, const LayoutView& layout, DType dtype, Tensors& c) {
  BS_RETURN_IF_ERROR(check_gradient_dtype({op, name, dw}, dtype));
  return c.output({op, name, dw}, dw.dtype, {layout.blocks, layout.block_size, layout.block_size});
}

Status check_backward(const MultiplicativeSaved& saved, const MultiplicativeOutputGrads& of,
                      const MultiplicativeGrads& grads, Backward& b, Tensors& c) {
  const DType dtype = b.dtype, state = sum_dtype(dtype);
  const int64_t steps = b.steps, n = b.n, hidden = b.hidden;
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "y", saved.y}, dtype, {steps, n, hidden}));
  BS_RETURN_IF_ERROR(c.input({c.op, "dy", of.y}, dtype, {steps, n, hidden}));
  BS_RETURN_IF_ERROR(c.input({c.op, "dh", of.h}, dtype, {n, hidden}));
  BS_RETURN_IF_ERROR(c.input({c.op, "dc", of.c}, state, {n, hidden}));
  BS_RETURN_IF_ERROR(c.needed_output({c.op, "dfactor", grads.factor}, dtype, {steps, n, hidden}));
  BS_RETURN_IF_ERROR(c.needed_output({c.op, "dpre", grads.pre}, dtype, {steps, n, kGates, hidden}));
  BS_RETURN_IF_ERROR(c.output({c.op, "dh0", grads.h0}, dtype, {n, hidden}));
  BS_RETURN_IF_ERROR(c.output({c.op, "dc0", grads.c0}, state, {n, hidden}));
  BS_RETURN_IF_ERROR(check_dw(c.op, "dw_m", grads.w_m, b.m.layout, dtype, c));
  BS_RETURN_IF_ERROR(check_dw(c.op, "dw", grads.w, b.gates.layout, dtype, c));
  BS_RETURN_IF_ERROR(sequence::check_saved(c.op, saved.saved, Made(b, b.steps).total));
  b.y = saved.y.data;
  b.saved = static_cast<const char*>(saved.saved.data);
  b.dy = of.y.data, b.dh = of.h.data, b.dc = of.c.data;
  b.dfactor = grads.factor.data, b.dpre = grads.pre.data, b.dh0 = grads.h0.data, b.dc0 = grads.c0.data;
  b.dw_m = grads.w_m.data, b.dw_m_dtype = grads.w_m.dtype;
  b.dw = grads.w.data, b.dw_dtype = grads.w.dtype;
  return c.disjoint();
}

size_t saved_bytes(const Sequence& s) { return static_cast<size_t>(Made(s, s.steps).total); }
size_t forward_bytes(const Sequence& s) {
  return static_cast<size_t>(ForwardSpace(s).linear) +
         std::max(sequence::forward_product_bytes(s.m.layout, s), sequence::forward_product_bytes(s.gates.layout, s));
}
size_t backward_bytes(const Sequence& s) {
  return static_cast<size_t>(BackwardSpace(s).linear) +
         std::max(sequence::backward_product_bytes(s.m.layout, s), sequence::backward_product_bytes(s.gates.layout, s));
}

// The bytes for a problem that the op would take; otherwise 0.
template <class Size>
size_t size_for(const MultiplicativeProblem& p, Device device, Size size) {
  Sequence s;
  s.dtype = p.dtype, s.device = device;
  s.steps = p.steps, s.n = p.n, s.hidden = p.layout_m.inputs();
  return sequence::is_right(s) && check_layouts("multiplicative", p.layout_m, p.layout, s).ok() ? size(s) : 0;
}

}  // namespace

Status multiplicative_forward(const MultiplicativeInputs& in, const MultiplicativeOutputs& out, Workspace workspace,
                              Stream stream) {
  const char* op = "multiplicative_forward";
  Forward f;
  BS_RETURN_IF_ERROR(check_sizes(op, in, f));
  Tensors c{op, f.device};
  BS_RETURN_IF_ERROR(check_inputs(in, f, c));
  BS_RETURN_IF_ERROR(c.needed_output({op, "y", out.y}, f.dtype, {f.steps, f.n, f.hidden}));
  BS_RETURN_IF_ERROR(c.needed_output({op, "h", out.h}, f.dtype, {f.n, f.hidden}));
  BS_RETURN_IF_ERROR(c.needed_output({op, "c", out.c}, sum_dtype(f.dtype), {f.n, f.hidden}));
  BS_RETURN_IF_ERROR(c.disjoint());
  f.y = out.y.data, f.h = out.h.data, f.c = out.c.data;
  f.saved = static_cast<char*>(out.saved.data);
  if (f.saved != nullptr || out.saved.bytes > 0)
    BS_RETURN_IF_ERROR(sequence::check_saved(op, out.saved, Made(f, f.steps).total));
  BS_RETURN_IF_ERROR(check_stream(op, stream));
  BS_RETURN_IF_ERROR(check_workspace(op, workspace, forward_bytes(f), f.device));
  return run_forward(f, workspace, stream);
}

Status multiplicative_backward(const MultiplicativeInputs& in, const MultiplicativeSaved& saved,
                               const MultiplicativeOutputGrads& of_outputs, const MultiplicativeGrads& grads,
                               Workspace workspace, Stream stream) {
  const char* op = "multiplicative_backward";
  Backward b;
  BS_RETURN_IF_ERROR(check_sizes(op, in, b));
  Tensors c{op, b.device};
  BS_RETURN_IF_ERROR(check_inputs(in, b, c));
  BS_RETURN_IF_ERROR(check_backward(saved, of_outputs, grads, b, c));
  BS_RETURN_IF_ERROR(check_stream(op, stream));
  BS_RETURN_IF_ERROR(check_workspace(op, workspace, backward_bytes(b), b.device));
  return run_backward(b, workspace, stream);
}

size_t multiplicative_saved_size(const MultiplicativeProblem& problem, Device device) {
  return size_for(problem, device, saved_bytes);
}
size_t multiplicative_forward_workspace_size(const MultiplicativeProblem& problem, Device device) {
  return size_for(problem, device, forward_bytes);
}
size_t multiplicative_backward_workspace_size(const MultiplicativeProblem& problem, Device device) {
  return size_for(problem, device, backward_bytes);
}

}  // namespace blocksparse
