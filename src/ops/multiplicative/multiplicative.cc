// The edge of the multiplicative LSTM: checks once, then runs the steps.
#include "ops/multiplicative/multiplicative.h"

#include <algorithm>

#include "blocksparse/blocksparse.h"
#include "core/checked_tensors.h"

namespace blocksparse {

using namespace multiplicative;  // NOLINT(google-build-using-namespace)

namespace {

constexpr int64_t kMostElements = int64_t{1} << 40;  // of [steps, n, H]: more do not fit into any memory

using Tensors = CheckedTensors<16>;

Status check_layout(const char* op, const char* name, const LayoutView& layout, int64_t rows, const Sequence& s) {
  if (layout.index == nullptr) return invalid("[", op, "] ", name, " is null");
  if (layout.device != s.device) {
    return invalid("[", op, "] ", name, "'s tables are not on the device of factor; copy Layout::index() there");
  }
  const int64_t out = layout.transposed ? layout.in_features : layout.out_features;
  const int64_t in = layout.transposed ? layout.out_features : layout.in_features;
  if (out == rows && in == s.hidden) return {};
  return invalid("[", op, "] ", name, " is ", out, " x ", in, ", needs ", rows, " x ", s.hidden);
}

Status check_sizes(const char* op, const MultiplicativeInputs& in, Sequence& s) {
  const ConstTensor& factor = in.factor;
  if (factor.device.type == DeviceType::cuda) BS_RETURN_IF_ERROR(cuda_status());
  if (!factor.given()) return invalid("[", op, "] factor is not given");
  BS_RETURN_IF_ERROR(check_tensor({op, "factor", factor}));
  if (factor.rank != 3 || factor.shape[2] < 8 || factor.shape[2] % 8 != 0) {
    return invalid("[", op, "] factor is ", shape_text(factor), ", needs [steps, n, H] with H a multiple of 8");
  }
  s.dtype = factor.dtype;
  s.device = factor.device;
  s.steps = factor.shape[0];
  s.n = factor.shape[1];
  s.hidden = factor.shape[2];
  if (s.n > kMostElements / s.hidden || s.steps > kMostElements / std::max<int64_t>(s.n * s.hidden, 1)) {
    return invalid("[", op, "] factor is ", shape_text(factor), ", too large");
  }
  BS_RETURN_IF_ERROR(check_layout(op, "layout_m", in.layout_m, s.hidden, s));
  BS_RETURN_IF_ERROR(check_layout(op, "layout", in.layout, kGates * s.hidden, s));
  s.layout_m = in.layout_m;
  s.layout = in.layout;
  return {};
}

Status check_inputs(const MultiplicativeInputs& in, Sequence& s, Tensors& c) {
  const DType dtype = s.dtype;
  const int64_t b_m = s.layout_m.block_size, b = s.layout.block_size;
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "factor", in.factor}, dtype, {s.steps, s.n, s.hidden}));
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "pre", in.pre}, dtype, {s.steps, s.n, kGates, s.hidden}));
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "h0", in.h0}, dtype, {s.n, s.hidden}));
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "c0", in.c0}, sum_dtype(dtype), {s.n, s.hidden}));
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "w_m", in.w_m}, dtype, {s.layout_m.blocks, b_m, b_m}));
  BS_RETURN_IF_ERROR(c.needed_input({c.op, "w", in.w}, dtype, {s.layout.blocks, b, b}));
  s.factor = in.factor.data, s.pre = in.pre.data, s.h0 = in.h0.data, s.c0 = in.c0.data;
  s.w_m = in.w_m.data, s.w = in.w.data;
  s.lengths = in.lengths;
  if (s.device.type != DeviceType::cpu) return {};  // lengths cannot be looked at
  for (int64_t i = 0; s.lengths != nullptr && i < s.n; ++i) {
    if (s.lengths[i] < 0 || s.lengths[i] > s.steps) {
      return invalid("[", c.op, "] lengths[", i, "] is ", s.lengths[i], ", needs 0 to ", s.steps);
    }
  }
  return {};
}

Status check_saved(const char* op, const Workspace& saved, const Sequence& s) {
  const auto needed = static_cast<size_t>(Made(s, s.steps).total);
  if (saved.data == nullptr && saved.bytes > 0)
    return invalid("[", op, "] saved has ", saved.bytes, " bytes at no place");
  if (saved.bytes < needed) return invalid("[", op, "] saved has ", saved.bytes, " bytes, needs ", needed);
  if (reinterpret_cast<uintptr_t>(saved.data) % 64 != 0) return invalid("[", op, "] saved needs an alignment of 64");
  return {};
}

Status check_dw(const char* op, const char* name, const Tensor& dw, const LayoutView& layout, DType dtype, Tensors& c) {
  const DType state = sum_dtype(dtype);
  if (dw.given() && dw.dtype != dtype && dw.dtype != state) {
    return invalid("[", op, "] ", name, " is ", name_of(dw.dtype), ", needs ", name_of(state), " or ", name_of(dtype));
  }
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
  BS_RETURN_IF_ERROR(check_dw(c.op, "dw_m", grads.w_m, b.layout_m, dtype, c));
  BS_RETURN_IF_ERROR(check_dw(c.op, "dw", grads.w, b.layout, dtype, c));
  BS_RETURN_IF_ERROR(check_saved(c.op, saved.saved, b));
  b.y = saved.y.data;
  b.saved = static_cast<const char*>(saved.saved.data);
  b.dy = of.y.data, b.dh = of.h.data, b.dc = of.c.data;
  b.dfactor = grads.factor.data, b.dpre = grads.pre.data, b.dh0 = grads.h0.data, b.dc0 = grads.c0.data;
  b.dw_m = grads.w_m.data, b.dw_m_dtype = grads.w_m.dtype;
  b.dw = grads.w.data, b.dw_dtype = grads.w.dtype;
  return c.disjoint();
}

// Bytes of `of` for inputs that make sense; else 0.
template <class Size>
size_t size_for(const MultiplicativeInputs& in, Size of) {
  Sequence s;
  return check_sizes("multiplicative", in, s).ok() ? of(s) : 0;
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
  if (f.saved != nullptr || out.saved.bytes > 0) BS_RETURN_IF_ERROR(check_saved(op, out.saved, f));
  BS_RETURN_IF_ERROR(check_stream(op, stream));
  BS_RETURN_IF_ERROR(check_workspace(op, workspace, multiplicative_forward_workspace_size(in)));
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
  BS_RETURN_IF_ERROR(check_workspace(op, workspace, multiplicative_backward_workspace_size(in)));
  return run_backward(b, workspace, stream);
}

size_t multiplicative_saved_size(const MultiplicativeInputs& in) {
  return size_for(in, [](const Sequence& s) { return static_cast<size_t>(Made(s, s.steps).total); });
}

size_t multiplicative_forward_workspace_size(const MultiplicativeInputs& in) {
  return size_for(in, [](const Sequence& s) {
    const size_t products = std::max(linear_fprop_workspace_size(s.layout_m, s.dtype, s.n, s.device),
                                     linear_fprop_workspace_size(s.layout, s.dtype, s.n, s.device));
    return static_cast<size_t>(ForwardSpace(s).linear) + products;
  });
}

size_t multiplicative_backward_workspace_size(const MultiplicativeInputs& in) {
  return size_for(in, [](const Sequence& s) {
    size_t products = 0;
    for (const LayoutView& layout : {s.layout_m, s.layout}) {
      products = std::max(products, linear_dgrad_workspace_size(layout, s.dtype, s.n, s.device));
      for (const int64_t steps : {s.steps, s.steps - 1, std::min<int64_t>(s.steps, 1)}) {
        products = std::max(products, linear_wgrad_workspace_size(layout, s.dtype, steps * s.n, s.device));
      }
    }
    return static_cast<size_t>(BackwardSpace(s).linear) + products;
  });
}

}  // namespace blocksparse
