// The edge of the pointwise half of gated linear units: it checks a call once, then hands it to a device. Products that
// end in a unit are in ops/linear.
#include "ops/glu/glu.h"

#include <algorithm>

#include "blocksparse/blocksparse.h"
#include "core/checks.h"
#include "core/text.h"
#include "cpu/threads.h"

namespace blocksparse {

namespace glu {

namespace {

constexpr int64_t kMost = int64_t{1} << 40;  // elements: more do not fit into any memory

int64_t last_of(const ConstTensor& t) { return t.rank > 0 ? t.shape[static_cast<size_t>(t.rank) - 1] : 0; }

// Checks a features-last matrix.
Result<Matrix> check_matrix(const Named& t, int64_t features, Use use) {
  if (!t.tensor.given()) return invalid("[", t.op, "] ", t.name, " is not given");
  const auto m = check_activations(t, features, use);
  if (!m.ok()) return m.status();
  if (m->feature_stride != 1 && m->features > 1) {
    return invalid("[", t.op, "] ", t.name, " has strides ", strides_text(t.tensor), ", needs features side by side");
  }
  return m;
}

Status check_like(const Named& t, const ConstTensor& z, int64_t n, const Matrix& m) {
  BS_RETURN_IF_ERROR(check_dtype(t, z.dtype));
  BS_RETURN_IF_ERROR(check_device(t, z.device));
  if (m.n == n) return {};
  return invalid("[", t.op, "] ", t.name, " is ", shape_text(t.tensor), " and z ", shape_text(z),
                 ", both need the same number of tokens");
}

Status check_call(const char* op, const ConstTensor& z, Activation activation, int64_t hidden, Stream stream) {
  if (!z.given()) return invalid("[", op, "] z is not given");
  BS_RETURN_IF_ERROR(check_device_type(op, z.device));
  if (z.device.type == DeviceType::cuda) BS_RETURN_IF_ERROR(cuda_status());
  BS_RETURN_IF_ERROR(check_tensor({op, "z", z}));
  if (hidden < 1 || hidden > kMost || last_of(z) != interleaved_features(hidden)) {
    return invalid("[", op, "] z is ", shape_text(z), ", needs ",
                   interleaved_features(std::max<int64_t>(1, std::min(hidden, kMost))), " features, gate and up of ",
                   hidden, " hidden ones");
  }
  if (activation < Activation::none || activation > Activation::gelu_tanh) {
    return invalid("[", op, "] activation is ", static_cast<int32_t>(activation),
                   ", needs 0 (none), 1 (relu), 2 (gelu), 3 (silu) or 4 (gelu_tanh)");
  }
  return check_stream(op, stream);
}

}  // namespace

Status forward(const Forward& f, Device device, Stream stream) {
  if (f.n == 0 || f.hidden == 0) return {};
  if (device.type == DeviceType::cuda) return cuda_forward(f, device, stream);
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  return cpu_forward(f, *isa, threads_for(stream.threads));
}

Status backward(const Backward& b, Device device, Stream stream) {
  if (b.n == 0 || b.hidden == 0) return {};
  if (device.type == DeviceType::cuda) return cuda_backward(b, device, stream);
  const auto isa = current_isa();
  if (!isa.ok()) return isa.status();
  return cpu_backward(b, *isa, threads_for(stream.threads));
}

}  // namespace glu

Status glu_forward(ConstTensor z, Activation activation, Tensor y, Stream stream) {
  const char* op = "glu_forward";
  const ConstTensor read_y = y;
  const int64_t hidden = glu::last_of(read_y);
  BS_RETURN_IF_ERROR(glu::check_call(op, z, activation, hidden, stream));
  const auto mz = glu::check_matrix({op, "z", z}, interleaved_features(hidden), Use::read);
  if (!mz.ok()) return mz.status();
  const auto my = glu::check_matrix({op, "y", read_y}, hidden, Use::write);
  if (!my.ok()) return my.status();
  BS_RETURN_IF_ERROR(glu::check_like({op, "y", read_y}, z, mz->n, *my));
  const int64_t size = size_of(z.dtype);
  const Region read[] = {{"z", z.data, *mz, size}};
  BS_RETURN_IF_ERROR(check_disjoint(op, {"y", y.data, *my, size}, read));
  return glu::forward({.dtype = z.dtype,
                       .activation = activation,
                       .n = mz->n,
                       .hidden = hidden,
                       .z = z.data,
                       .y = y.data,
                       .z_token = mz->token_stride,
                       .y_token = my->token_stride},
                      z.device, stream);
}

Status glu_backward(ConstTensor z, ConstTensor dy, Activation activation, Tensor dz, Stream stream) {
  const char* op = "glu_backward";
  const ConstTensor read_dz = dz;
  const int64_t hidden = glu::last_of(dy), features = interleaved_features(hidden);
  BS_RETURN_IF_ERROR(glu::check_call(op, z, activation, hidden, stream));
  const auto mz = glu::check_matrix({op, "z", z}, features, Use::read);
  if (!mz.ok()) return mz.status();
  const auto my = glu::check_matrix({op, "dy", dy}, hidden, Use::read);
  if (!my.ok()) return my.status();
  const auto md = glu::check_matrix({op, "dz", read_dz}, features, Use::write);
  if (!md.ok()) return md.status();
  BS_RETURN_IF_ERROR(glu::check_like({op, "dy", dy}, z, mz->n, *my));
  BS_RETURN_IF_ERROR(glu::check_like({op, "dz", read_dz}, z, mz->n, *md));
  const int64_t size = size_of(z.dtype);
  const Region read[] = {{"z", z.data, *mz, size}, {"dy", dy.data, *my, size}};
  BS_RETURN_IF_ERROR(check_disjoint(op, {"dz", dz.data, *md, size}, read));
  return glu::backward({.dtype = z.dtype,
                        .activation = activation,
                        .n = mz->n,
                        .hidden = hidden,
                        .z = z.data,
                        .dy = dy.data,
                        .dz = dz.data,
                        .z_token = mz->token_stride,
                        .dy_token = my->token_stride,
                        .dz_token = md->token_stride},
                       z.device, stream);
}

}  // namespace blocksparse
