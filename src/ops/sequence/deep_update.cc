// The edge of the deep-update op: it checks a call once, then runs the steps.
#include "ops/sequence/deep_update.h"

#include <cmath>
#include <cstdio>

#include "blocksparse/blocksparse.h"
#include "core/text.h"
#include "ops/lstm/lstm.h"

namespace blocksparse {

using namespace deep_update;  // NOLINT(google-build-using-namespace)

namespace {

using Tensors = CheckedTensors<3 * kMostMatrices + 8>;

// Text such as "deep_update_forward, matrix 2", for messages, without an allocation.
struct OpOfMatrix {
  char text[64];
  OpOfMatrix(const char* op, int matrix) { std::snprintf(text, sizeof(text), "%s, matrix %d", op, matrix); }
};

// Checks the layouts for the H of `s`.
Status check_layouts(const char* op, std::span<const DeepUpdateMatrix> matrices, Sequence& s) {
  const auto count = static_cast<int64_t>(matrices.size());
  if (count < kLeastMatrices || count > kMostMatrices) {
    return invalid("[", op, "] there are ", count, " matrices, needs ", kLeastMatrices, " to ", kMostMatrices);
  }
  s.count = static_cast<int>(count);
  for (int j = 0; j < s.count; ++j) {
    const LayoutView& layout = matrices[static_cast<size_t>(j)].layout;
    const OpOfMatrix named(op, j);
    BS_RETURN_IF_ERROR(sequence::check_layout(named.text, "layout", layout, s.groups(j) * s.hidden, s));
    s.matrices[static_cast<size_t>(j)].layout = layout;
  }
  return {};
}

Status check_sizes(const char* op, const DeepUpdateInputs& in, Sequence& s) {
  BS_RETURN_IF_ERROR(sequence::check_steps(op, in.factor, s));
  return check_layouts(op, in.matrices, s);
}

Status check_inputs(const DeepUpdateInputs& in, Sequence& s, Tensors& c) {
  const DType dtype = s.dtype, state = sum_dtype(dtype);
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "factor", in.factor}, dtype, {s.steps, s.n, s.hidden}));
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "term", in.term}, dtype, {s.steps, s.n, s.hidden}));
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "h0", in.h0}, dtype, {s.n, s.hidden}));
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "c0", in.c0}, state, {s.n, s.hidden}));
  for (int j = 0; j < s.count; ++j) {
    const DeepUpdateMatrix& m = in.matrices[static_cast<size_t>(j)];
    const OpOfMatrix op(c.op, j);
    const int64_t b = m.layout.block_size, features = s.groups(j) * s.hidden;
    BS_RETURN_IF_ERROR(c.needed_input({op.text, "w", m.w}, dtype, {m.layout.blocks, b, b}));
    BS_RETURN_IF_ERROR(c.needed_input({op.text, "gain", m.gain}, state, {features}));
    BS_RETURN_IF_ERROR(c.needed_input({op.text, "shift", m.shift}, state, {features}));
    s.matrices[static_cast<size_t>(j)] = {{m.layout, m.w.data}, m.gain.data, m.shift.data};
  }
  if (!(in.epsilon > 0) || !std::isfinite(in.epsilon)) {
    return invalid("[", c.op, "] epsilon is ", in.epsilon, ", needs a positive number");
  }
  s.factor = in.factor.data, s.term = in.term.data, s.h0 = in.h0.data, s.c0 = in.c0.data;
  s.lengths = in.lengths;
  s.epsilon = in.epsilon;
  return lstm::check_lengths(c.op, s.device, s.lengths, s.n, s.steps);
}

Status check_matrix_grads(const DeepUpdateInputs& in, const DeepUpdateGrads& grads, Backward& b, Tensors& c) {
  const DType state = sum_dtype(b.dtype);
  if (grads.matrices.size() != in.matrices.size()) {
    return invalid("[", c.op, "] there are gradients of ", grads.matrices.size(), " matrices, needs ",
                   in.matrices.size());
  }
  for (int j = 0; j < b.count; ++j) {
    const DeepUpdateMatrixGrads& g = grads.matrices[static_cast<size_t>(j)];
    const OpOfMatrix op(c.op, j);
    const LayoutView& layout = b.matrices[static_cast<size_t>(j)].layout;
    const int64_t block = layout.block_size, features = b.groups(j) * b.hidden;
    BS_RETURN_IF_ERROR(check_gradient_dtype({op.text, "dw", g.w}, b.dtype));
    BS_RETURN_IF_ERROR(c.output({op.text, "dw", g.w}, g.w.dtype, {layout.blocks, block, block}));
    BS_RETURN_IF_ERROR(c.needed_output({op.text, "dgain", g.gain}, state, {features}));
    BS_RETURN_IF_ERROR(c.needed_output({op.text, "dshift", g.shift}, state, {features}));
    b.grads[static_cast<size_t>(j)] = {g.w.data, g.gain.data, g.shift.data, g.w.dtype};
  }
  return {};
}

Status check_backward(const DeepUpdateInputs& in, const DeepUpdateSaved& saved, const DeepUpdateOutputGrads& of,
                      const DeepUpdateGrads& grads, Backward& b, Tensors& c) {
  const DType dtype = b.dtype, state = sum_dtype(dtype);
  const int64_t steps = b.steps, n = b.n, hidden = b.hidden;
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "y", saved.y}, dtype, {steps, n, hidden}));
  BS_RETURN_IF_ERROR(c.input({c.op, "dy", of.y}, dtype, {steps, n, hidden}));
  BS_RETURN_IF_ERROR(c.input({c.op, "dh", of.h}, dtype, {n, hidden}));
  BS_RETURN_IF_ERROR(c.input({c.op, "dc", of.c}, state, {n, hidden}));
  BS_RETURN_IF_ERROR(c.needed_output({c.op, "dfactor", grads.factor}, dtype, {steps, n, hidden}));
  BS_RETURN_IF_ERROR(c.needed_output({c.op, "dterm", grads.term}, dtype, {steps, n, hidden}));
  BS_RETURN_IF_ERROR(c.output({c.op, "dh0", grads.h0}, dtype, {n, hidden}));
  BS_RETURN_IF_ERROR(c.output({c.op, "dc0", grads.c0}, state, {n, hidden}));
  BS_RETURN_IF_ERROR(check_matrix_grads(in, grads, b, c));
  BS_RETURN_IF_ERROR(sequence::check_saved(c.op, saved.saved, Made(b, b.steps).total));
  b.y = saved.y.data;
  b.saved = static_cast<const char*>(saved.saved.data);
  b.dy = of.y.data, b.dh = of.h.data, b.dc = of.c.data;
  b.dfactor = grads.factor.data, b.dterm = grads.term.data, b.dh0 = grads.h0.data, b.dc0 = grads.c0.data;
  return c.disjoint();
}

template <class OfLayout>
size_t most_of_layouts(const Sequence& s, OfLayout bytes) {
  size_t most = 0;
  for (int j = 0; j < s.count; ++j) most = std::max(most, bytes(s.matrices[static_cast<size_t>(j)].layout, s));
  return most;
}

size_t saved_bytes(const Sequence& s) { return static_cast<size_t>(Made(s, s.steps).total); }
size_t forward_bytes(const Sequence& s) {
  return static_cast<size_t>(ForwardSpace(s).linear) + most_of_layouts(s, sequence::forward_product_bytes);
}
size_t backward_bytes(const Sequence& s) {
  return static_cast<size_t>(BackwardSpace(s).linear) + most_of_layouts(s, sequence::backward_product_bytes);
}

// The bytes for a problem that the op would take; otherwise 0.
template <class Size>
size_t size_for(const DeepUpdateProblem& p, Device device, Size size) {
  if (p.matrices.empty()) return 0;
  Sequence s;
  s.dtype = p.dtype, s.device = device;
  s.steps = p.steps, s.n = p.n, s.hidden = p.matrices.front().layout.inputs();
  return sequence::is_right(s) && check_layouts("deep_update", p.matrices, s).ok() ? size(s) : 0;
}

}  // namespace

Status deep_update_forward(const DeepUpdateInputs& in, const DeepUpdateOutputs& out, Workspace workspace,
                           Stream stream) {
  const char* op = "deep_update_forward";
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

Status deep_update_backward(const DeepUpdateInputs& in, const DeepUpdateSaved& saved,
                            const DeepUpdateOutputGrads& of_outputs, const DeepUpdateGrads& grads, Workspace workspace,
                            Stream stream) {
  const char* op = "deep_update_backward";
  Backward b;
  BS_RETURN_IF_ERROR(check_sizes(op, in, b));
  Tensors c{op, b.device};
  BS_RETURN_IF_ERROR(check_inputs(in, b, c));
  BS_RETURN_IF_ERROR(check_backward(in, saved, of_outputs, grads, b, c));
  BS_RETURN_IF_ERROR(check_stream(op, stream));
  BS_RETURN_IF_ERROR(check_workspace(op, workspace, backward_bytes(b), b.device));
  return run_backward(b, workspace, stream);
}

size_t deep_update_saved_size(const DeepUpdateProblem& problem, Device device) {
  return size_for(problem, device, saved_bytes);
}
size_t deep_update_forward_workspace_size(const DeepUpdateProblem& problem, Device device) {
  return size_for(problem, device, forward_bytes);
}
size_t deep_update_backward_workspace_size(const DeepUpdateProblem& problem, Device device) {
  return size_for(problem, device, backward_bytes);
}

}  // namespace blocksparse
