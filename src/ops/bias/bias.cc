// The gradient of a bias: its edge, and the sums on the CPU.
#include "ops/bias/bias.h"

#include <algorithm>

#include "blocksparse/blocksparse.h"
#include "core/checks.h"
#include "core/convert.h"
#include "core/text.h"
#include "cpu/threads.h"

namespace blocksparse {

namespace bias {

namespace {

constexpr int64_t kStrip = 64;  // features of a task
constexpr int64_t kRun = 64;    // tokens that are summed before they are added to the rest, which keeps rounding small

// Sums a strip. `at(t, f)` is an element in the type of the sums.
template <class Sum, class At>
void sum_strip(const Gradient& g, int64_t first, At at) {
  const int64_t count = std::min(kStrip, g.features - first);
  Sum all[kStrip] = {};
  for (int64_t begin = 0; begin < g.n; begin += kRun) {
    Sum run[kStrip] = {};
    for (int64_t t = begin; t < std::min(begin + kRun, g.n); ++t) {
      for (int64_t f = 0; f < count; ++f) run[f] += at(t * g.token_stride + first + f);
    }
    for (int64_t f = 0; f < count; ++f) all[f] += run[f];
  }
  for (int64_t f = 0; f < count; ++f) store_element(g.dbias, first + f, g.dtype, static_cast<double>(all[f]));
}

void sum_strip(const Gradient& g, int64_t first) {
  switch (g.dtype) {
    case DType::f64: return sum_strip<double>(g, first, [&](int64_t i) { return static_cast<const double*>(g.dy)[i]; });
    case DType::f32: return sum_strip<float>(g, first, [&](int64_t i) { return static_cast<const float*>(g.dy)[i]; });
    case DType::bf16:
      return sum_strip<float>(g, first,
                              [&](int64_t i) { return bf16_to_float(static_cast<const uint16_t*>(g.dy)[i]); });
    case DType::f16:
      return sum_strip<float>(g, first, [&](int64_t i) { return f16_to_float(static_cast<const uint16_t*>(g.dy)[i]); });
  }
}

void cpu_gradient(const Gradient& g, int32_t threads) {
  threads = worthwhile_threads(threads, static_cast<double>(g.n) * static_cast<double>(g.features));
  parallel_for(threads, ceil_div(g.features, kStrip), [&](int64_t strip) { sum_strip(g, strip * kStrip); });
}

}  // namespace

}  // namespace bias

Status bias_gradient(ConstTensor dy, Tensor dbias, Workspace workspace, Stream stream) {
  const char* op = "bias_gradient";
  if (!dy.given()) return invalid("[", op, "] dy is not given");
  BS_RETURN_IF_ERROR(check_device_type(op, dy.device));
  const bool on_card = dy.device.type == DeviceType::cuda;
  if (on_card) BS_RETURN_IF_ERROR(cuda_status());
  const Named named{op, "dy", dy};
  BS_RETURN_IF_ERROR(check_tensor(named));
  const int64_t features = dy.shape[static_cast<size_t>(dy.rank) - 1];
  const auto m = check_activations(named, features, Use::read);
  if (!m.ok()) return m.status();
  if (m->feature_stride != 1 && features > 1) {
    return invalid("[", op, "] dy has strides ", strides_text(dy), ", needs features side by side");
  }
  if (!dbias.given()) return invalid("[", op, "] dbias is not given");
  const ConstTensor read_dbias = dbias;
  const Named sum{op, "dbias", read_dbias};
  BS_RETURN_IF_ERROR(check_contiguous(sum, {features}));
  BS_RETURN_IF_ERROR(check_dtype(sum, dy.dtype));
  BS_RETURN_IF_ERROR(check_device(sum, dy.device));
  const Region read[] = {{"dy", dy.data, *m, size_of(dy.dtype)}};
  BS_RETURN_IF_ERROR(check_disjoint(op, region_of("dbias", read_dbias), read));
  BS_RETURN_IF_ERROR(check_workspace(op, workspace, bias_gradient_workspace_size(dy), dy.device));
  BS_RETURN_IF_ERROR(check_stream(op, stream));
  if (features == 0) return {};
  const bias::Gradient g{dy.dtype, m->n, features, m->token_stride, dy.data, dbias.data};
  if (on_card) return bias::cuda_gradient(g, workspace, dy.device, stream);
  bias::cpu_gradient(g, threads_for(stream.threads));
  return {};
}

size_t bias_gradient_workspace_size(const ConstTensor& dy) {
  constexpr int64_t kMost = int64_t{1} << 58;  // elements
  if (dy.device.type != DeviceType::cuda || dy.rank < 1 || dy.rank > kMaxRank || size_of(dy.dtype) == 0) return 0;
  const int64_t features = dy.shape[static_cast<size_t>(dy.rank) - 1];
  int64_t n = 1;
  for (int32_t i = 0; i + 1 < dy.rank; ++i) {
    const int64_t size = dy.shape[static_cast<size_t>(i)];
    if (size < 1 || size > kMost / n) return 0;
    n *= size;
  }
  if (features < 1 || features > kMost / n) return 0;
  // Whether dy can be read in vectors is not known yet.
  const int64_t sum_bytes = size_of(sum_dtype(dy.dtype)), vector = 16 / size_of(dy.dtype);
  const int64_t wide = bias::plan_of(n, features, static_cast<int32_t>(vector), sum_bytes).part_bytes;
  return static_cast<size_t>(std::max(wide, bias::plan_of(n, features, 1, sum_bytes).part_bytes));
}

}  // namespace blocksparse
