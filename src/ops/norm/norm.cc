// The edge of the layer norm: it checks a call once, then hands it to a device.
#include "ops/norm/norm.h"

#include <cmath>

#include "blocksparse/blocksparse.h"
#include "core/checked_tensors.h"
#include "cpu/threads.h"

namespace blocksparse {

using namespace norm;  // NOLINT(google-build-using-namespace)

namespace {

using Tensors = CheckedTensors<8>;

constexpr int64_t kMost = int64_t{1} << 40;  // elements: more do not fit into any memory

Status check_x(const char* op, const ConstTensor& x) {
  if (x.device.type == DeviceType::cuda) BS_RETURN_IF_ERROR(cuda_status());
  BS_RETURN_IF_ERROR(Tensors::given({op, "x", x}));
  BS_RETURN_IF_ERROR(check_tensor({op, "x", x}));
  if (x.rank != 3 || x.shape[1] < 1 || x.shape[2] < 1) {
    return invalid("[", op, "] x is ", shape_text(x), ", needs [n, groups, H]");
  }
  if (x.shape[2] > kMost / x.shape[1] || x.shape[0] > kMost / (x.shape[1] * x.shape[2])) {
    return invalid("[", op, "] x is ", shape_text(x), ", too large");
  }
  return {};
}

template <class Task>
void set_sizes(const ConstTensor& x, bool relu, Task& task) {
  task.dtype = x.dtype;
  task.n = x.shape[0];
  task.groups = x.shape[1];
  task.features = x.shape[2];
  task.relu = relu;
}

}  // namespace

Status layer_norm_forward(const LayerNormInputs& in, const LayerNormOutputs& out, Stream stream) {
  const char* op = "layer_norm_forward";
  BS_RETURN_IF_ERROR(check_x(op, in.x));
  const int64_t n = in.x.shape[0], groups = in.x.shape[1], features = in.x.shape[2];
  const DType dtype = in.x.dtype, sums = sum_dtype(dtype);
  Tensors c{op, in.x.device};
  BS_RETURN_IF_ERROR(c.needed_input({op, "x", in.x}, dtype, {n, groups, features}));
  BS_RETURN_IF_ERROR(c.needed_input({op, "gain", in.gain}, sums, {groups, features}));
  BS_RETURN_IF_ERROR(c.needed_input({op, "shift", in.shift}, sums, {groups, features}));
  BS_RETURN_IF_ERROR(c.input({op, "factor", in.factor}, dtype, {n, groups, features}));
  BS_RETURN_IF_ERROR(c.input({op, "term", in.term}, dtype, {n, groups, features}));
  BS_RETURN_IF_ERROR(c.needed_output({op, "y", out.y}, dtype, {n, groups, features}));
  BS_RETURN_IF_ERROR(c.needed_output({op, "stats", out.stats}, sums, {n, groups, 2}));
  BS_RETURN_IF_ERROR(c.disjoint());
  if (!(in.epsilon > 0) || !std::isfinite(in.epsilon)) {
    return invalid("[", op, "] epsilon is ", in.epsilon, ", needs a positive number");
  }
  BS_RETURN_IF_ERROR(check_stream(op, stream));
  Forward f;
  set_sizes(in.x, in.relu, f);
  f.epsilon = in.epsilon;
  f.x = in.x.data, f.gain = in.gain.data, f.shift = in.shift.data;
  f.factor = in.factor.data, f.term = in.term.data;
  f.y = out.y.data, f.stats = out.stats.data;
  if (in.x.device.type == DeviceType::cuda) return cuda_forward(f, in.x.device, stream);
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  return cpu_forward(f, *isa, threads_for(stream.threads));
}

Status layer_norm_backward(const LayerNormSaved& saved, ConstTensor dy, const LayerNormGrads& grads, Stream stream) {
  const char* op = "layer_norm_backward";
  BS_RETURN_IF_ERROR(check_x(op, saved.x));
  const int64_t n = saved.x.shape[0], groups = saved.x.shape[1], features = saved.x.shape[2];
  const DType dtype = saved.x.dtype, sums = sum_dtype(dtype);
  Tensors c{op, saved.x.device};
  BS_RETURN_IF_ERROR(c.needed_input({op, "x", saved.x}, dtype, {n, groups, features}));
  BS_RETURN_IF_ERROR(c.needed_input({op, "gain", saved.gain}, sums, {groups, features}));
  if (grads.factor.given()) BS_RETURN_IF_ERROR(Tensors::given({op, "shift", saved.shift}));
  BS_RETURN_IF_ERROR(c.input({op, "shift", saved.shift}, sums, {groups, features}));
  if (grads.factor.given()) BS_RETURN_IF_ERROR(Tensors::given({op, "factor", saved.factor}));
  BS_RETURN_IF_ERROR(c.input({op, "factor", saved.factor}, dtype, {n, groups, features}));
  if (saved.relu) BS_RETURN_IF_ERROR(Tensors::given({op, "y", saved.y}));
  BS_RETURN_IF_ERROR(c.input({op, "y", saved.y}, dtype, {n, groups, features}));
  BS_RETURN_IF_ERROR(c.needed_input({op, "stats", saved.stats}, sums, {n, groups, 2}));
  BS_RETURN_IF_ERROR(c.needed_input({op, "dy", dy}, dtype, {n, groups, features}));
  if (!grads.gain.given()) BS_RETURN_IF_ERROR(Tensors::given({op, "dx", grads.x}));
  BS_RETURN_IF_ERROR(c.output({op, "dx", grads.x}, dtype, {n, groups, features}));
  if (grads.shift.given()) BS_RETURN_IF_ERROR(Tensors::given({op, "dgain", grads.gain}));
  BS_RETURN_IF_ERROR(c.output({op, "dgain", grads.gain}, sums, {groups, features}));
  if (grads.gain.given()) BS_RETURN_IF_ERROR(Tensors::given({op, "dshift", grads.shift}));
  BS_RETURN_IF_ERROR(c.output({op, "dshift", grads.shift}, sums, {groups, features}));
  BS_RETURN_IF_ERROR(c.output({op, "dfactor", grads.factor}, dtype, {n, groups, features}));
  BS_RETURN_IF_ERROR(c.output({op, "dterm", grads.term}, dtype, {n, groups, features}));
  BS_RETURN_IF_ERROR(c.disjoint());
  BS_RETURN_IF_ERROR(check_stream(op, stream));
  Backward b;
  set_sizes(saved.x, saved.relu, b);
  b.x = saved.x.data, b.gain = saved.gain.data, b.shift = saved.shift.data, b.factor = saved.factor.data;
  b.y = saved.y.data, b.stats = saved.stats.data, b.dy = dy.data;
  b.dx = grads.x.data, b.dgain = grads.gain.data, b.dshift = grads.shift.data;
  b.dfactor = grads.factor.data, b.dterm = grads.term.data;
  if (saved.x.device.type == DeviceType::cuda) return cuda_backward(b, saved.x.device, stream);
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  return cpu_backward(b, *isa, threads_for(stream.threads));
}

}  // namespace blocksparse
