// The edge of the layer norm: checks once, then hands on to a device.
#include "ops/norm/norm.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "blocksparse/blocksparse.h"
#include "core/checks.h"
#include "core/text.h"
#include "cpu/threads.h"

namespace blocksparse {

using namespace norm;  // NOLINT(google-build-using-namespace)

namespace {

constexpr int64_t kMost = int64_t{1} << 40;  // elements: more do not fit into any memory

// The tensors of a call, whose sizes x tells.
struct Checker {
  const char* op;
  ConstTensor x;
  std::array<Region, 8> read = {}, written = {};
  size_t reads = 0, writes = 0;

  enum class Shape { rows, features, stats };  // [n, groups, H], [groups, H], [n, groups, 2]

  Status check(const char* name, const ConstTensor& t, Shape shape) const {
    const Named named{op, name, t};
    const int64_t n = x.shape[0], groups = x.shape[1], features = x.shape[2];
    if (shape == Shape::rows) BS_RETURN_IF_ERROR(check_contiguous(named, {n, groups, features}));
    else if (shape == Shape::features) BS_RETURN_IF_ERROR(check_contiguous(named, {groups, features}));
    else BS_RETURN_IF_ERROR(check_contiguous(named, {n, groups, 2}));
    BS_RETURN_IF_ERROR(check_dtype(named, shape == Shape::rows ? x.dtype : sum_dtype(x.dtype)));
    return check_device(named, x.device);
  }
  Status input(const char* name, const ConstTensor& t, Shape shape, bool needed) {
    if (needed && !t.given()) return invalid("[", op, "] ", name, " is not given");
    if (t.given()) BS_RETURN_IF_ERROR(check(name, t, shape));
    read[reads++] = region_of(name, t);
    return {};
  }
  Status output(const char* name, const ConstTensor& t, Shape shape, bool needed) {
    if (needed && !t.given()) return invalid("[", op, "] ", name, " is not given");
    if (t.given()) BS_RETURN_IF_ERROR(check(name, t, shape));
    written[writes++] = region_of(name, t);
    return {};
  }
  Status disjoint() const {
    for (size_t i = 0; i < writes; ++i) {
      BS_RETURN_IF_ERROR(check_disjoint(op, written[i], std::span(read).first(reads)));
      BS_RETURN_IF_ERROR(check_disjoint(op, written[i], std::span(written).subspan(i + 1, writes - i - 1)));
    }
    return {};
  }
};

Status check_x(const char* op, const ConstTensor& x) {
  if (x.device.type == DeviceType::cuda) BS_RETURN_IF_ERROR(cuda_status());
  if (!x.given()) return invalid("[", op, "] x is not given");
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
  using Shape = Checker::Shape;
  BS_RETURN_IF_ERROR(check_x(op, in.x));
  Checker c{op, in.x};
  BS_RETURN_IF_ERROR(c.input("x", in.x, Shape::rows, true));
  BS_RETURN_IF_ERROR(c.input("gain", in.gain, Shape::features, true));
  BS_RETURN_IF_ERROR(c.input("shift", in.shift, Shape::features, true));
  BS_RETURN_IF_ERROR(c.input("factor", in.factor, Shape::rows, false));
  BS_RETURN_IF_ERROR(c.input("term", in.term, Shape::rows, false));
  BS_RETURN_IF_ERROR(c.output("y", out.y, Shape::rows, true));
  BS_RETURN_IF_ERROR(c.output("stats", out.stats, Shape::stats, true));
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
  using Shape = Checker::Shape;
  BS_RETURN_IF_ERROR(check_x(op, saved.x));
  Checker c{op, saved.x};
  BS_RETURN_IF_ERROR(c.input("x", saved.x, Shape::rows, true));
  BS_RETURN_IF_ERROR(c.input("gain", saved.gain, Shape::features, true));
  BS_RETURN_IF_ERROR(c.input("shift", saved.shift, Shape::features, grads.factor.given()));
  BS_RETURN_IF_ERROR(c.input("factor", saved.factor, Shape::rows, grads.factor.given()));
  BS_RETURN_IF_ERROR(c.input("y", saved.y, Shape::rows, saved.relu));
  BS_RETURN_IF_ERROR(c.input("stats", saved.stats, Shape::stats, true));
  BS_RETURN_IF_ERROR(c.input("dy", dy, Shape::rows, true));
  BS_RETURN_IF_ERROR(c.output("dx", grads.x, Shape::rows, !grads.gain.given()));
  BS_RETURN_IF_ERROR(c.output("dgain", grads.gain, Shape::features, grads.shift.given()));
  BS_RETURN_IF_ERROR(c.output("dshift", grads.shift, Shape::features, grads.gain.given()));
  BS_RETURN_IF_ERROR(c.output("dfactor", grads.factor, Shape::rows, false));
  BS_RETURN_IF_ERROR(c.output("dterm", grads.term, Shape::rows, false));
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
