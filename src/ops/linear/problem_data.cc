// Data for a linear problem, and its comparison with the reference.
#include "ops/linear/problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "blocksparse/graphs.h"
#include "core/convert.h"
#include "core/random.h"
#include "core/text.h"
#include "cuda/memory.h"

namespace blocksparse::linear {

namespace {

// A matrix [n, features] with `pad` elements after each row and `offset` before the first.
Buffer make_matrix(DType dtype, int64_t n, int64_t features, Order order, int64_t pad, int64_t offset) {
  const int64_t rows = order == Order::features_last ? n : features;
  const int64_t width = order == Order::features_last ? features : n;
  const int64_t elements = rows * (width + pad) + offset;
  Buffer buffer;
  buffer.bytes.assign(static_cast<size_t>(elements * size_of(dtype) + 2 * kGuard), kPoison);
  buffer.tensor = activations(static_cast<void*>(buffer.bytes.data() + kGuard + offset * size_of(dtype)), dtype, n,
                              features, order);
  buffer.tensor.stride[order == Order::features_last ? 0 : 1] = width + pad;
  return buffer;
}

Buffer make_array(DType dtype, std::initializer_list<int64_t> shape) {
  Buffer buffer;
  buffer.tensor = Tensor(nullptr, dtype, shape);
  int64_t elements = 1;
  for (int64_t dim : shape) elements *= dim;
  buffer.bytes.assign(static_cast<size_t>(elements * size_of(dtype) + 2 * kGuard), kPoison);
  buffer.tensor.data = buffer.bytes.data() + kGuard;
  return buffer;
}

int64_t count_of(const Tensor& t) {
  int64_t count = 1;
  for (int i = 0; i < t.rank; ++i) count *= t.shape[static_cast<size_t>(i)];
  return count;
}

double normal(Random& rng) {
  return std::sqrt(-2 * std::log(1 - rng.uniform())) * std::cos(6.283185307179586 * rng.uniform());
}

// Values that are exact in `dtype`; the largest magnitude is returned.
double fill(const Buffer& buffer, Random& rng, bool integers) {
  double largest = 0;
  for_each_element(buffer.tensor, [&](int64_t i) {
    const double value = integers ? static_cast<double>(rng.below(5) - 2) : normal(rng);
    store_element(buffer.tensor.data, i, buffer.tensor.dtype, value);
    largest = std::max(largest, std::abs(load_element(buffer.tensor.data, i, buffer.tensor.dtype)));
  });
  return largest;
}

// What of a block lies beyond the matrix must not matter.
void poison_beyond(const Buffer& w, const Layout& layout) {
  const LayoutView view = layout.view();
  const auto refs = walk_of(view, false).refs;
  const auto rows = out_of(view);
  const int64_t b = view.block_size;
  for (int64_t i = 0; i < view.blocks; ++i) {
    for (int64_t o = 0; o < b; ++o) {
      for (int64_t k = 0; k < b; ++k) {
        const bool inside = rows[static_cast<size_t>(i)] * b + o < view.out_features &&
                            refs[static_cast<size_t>(i)].from * b + k < view.in_features;
        if (!inside) store_element(w.tensor.data, (i * b + o) * b + k, w.tensor.dtype, NAN);
      }
    }
  }
}

double epsilon(DType dtype) {
  switch (dtype) {
    case DType::f64: return 0x1p-53;
    case DType::f32: return 0x1p-24;
    case DType::bf16: return 0x1p-8;
    case DType::f16: return 0x1p-11;
  }
  return 0;
}

}  // namespace

Buffer Buffer::wide() const {
  Buffer copy;
  if (!tensor.given()) return copy;
  if (tensor.rank == 2) copy = make_matrix(DType::f64, tensor.shape[0], tensor.shape[1], Order::features_last, 0, 0);
  else if (tensor.rank == 1) copy = make_array(DType::f64, {tensor.shape[0]});
  else copy = make_array(DType::f64, {tensor.shape[0], tensor.shape[1], tensor.shape[2]});
  std::vector<double> values;
  for_each_element(tensor, [&](int64_t i) { values.push_back(load_element(tensor.data, i, tensor.dtype)); });
  std::copy(values.begin(), values.end(), static_cast<double*>(copy.tensor.data));
  return copy;
}

Result<LinearData> LinearData::make(const LinearCase& c) {
  auto coordinates = graphs::by_name(c.graph, c.seed);
  if (!coordinates.ok()) return coordinates.status();
  BlockCoordinates kept{coordinates->out_blocks, coordinates->in_blocks, {}, {}};
  for (size_t i = 0; i < coordinates->out.size(); ++i) {
    if (coordinates->out[i] == c.empty_row || coordinates->in[i] == c.empty_col) continue;
    kept.out.push_back(coordinates->out[i]);
    kept.in.push_back(coordinates->in[i]);
  }
  auto layout = Layout::from_coordinates(
      kept,
      {.block_size = static_cast<int32_t>(c.block), .out_features = c.out_features, .in_features = c.in_features});
  if (!layout.ok()) return layout.status();
  LinearData data(c, c.transposed ? layout->t() : *layout);
  data.view_ = data.layout_;
  data.make_data();
  data.view_.device = c.device;  // so that the workspace is that of the card
  data.workspace_.assign(data.workspace_size() + static_cast<size_t>(kGuard), kPoison);
  if (c.device.type == DeviceType::cuda) BS_RETURN_IF_ERROR(data.move_to_device());
  return data;
}

void LinearData::make_data() {
  const LinearCase& c = case_;
  Random rng(static_cast<uint64_t>(c.seed) + 1);
  const int64_t b = layout_.block_size(), in = layout_.in_features(), out = layout_.out_features();
  const DType sums = sum_dtype(c.dtype);
  w_ = make_array(c.dtype, {layout_.blocks(), b, b});
  max_w_ = fill(w_, rng, c.integers);
  poison_beyond(w_, layout_);
  if (c.gates) {
    gates_ = make_array(sums, {layout_.blocks()});
    fill(gates_, rng, c.integers);
    for (int64_t i = 0; i < layout_.blocks(); i += 3) store_element(gates_.tensor.data, i, sums, 0);
  }
  if (c.pass == Pass::wgrad) {
    for (int64_t i = 0; i < c.pairs; ++i) {
      const int64_t n = i == 1 ? c.n / 2 : c.n;  // not all pairs are of one length
      x_.push_back(make_matrix(c.dtype, n, in, c.x_order, c.pad, c.offset));
      dy_.push_back(make_matrix(c.dtype, n, out, c.y_order, c.pad, c.offset));
      max_x_ = std::max(max_x_, fill(x_.back(), rng, c.integers));
      max_dy_ = std::max(max_dy_, fill(dy_.back(), rng, c.integers));
    }
    y_ = make_array(c.dw_dtype.value_or(c.dtype), {layout_.blocks(), b, b});
    before_ = make_array(y_.tensor.dtype, {layout_.blocks(), b, b});
    fill(before_, rng, c.integers);
    if (c.dgates) {
      dgates_ = make_array(sums, {layout_.blocks()});
      gates_before_ = make_array(sums, {layout_.blocks()});
      fill(gates_before_, rng, c.integers);
    }
  } else {
    const bool forward = c.pass == Pass::fprop;
    x_.push_back(make_matrix(c.dtype, c.n, forward ? in : out, c.x_order, c.pad, c.offset));
    max_x_ = fill(x_.back(), rng, c.integers);
    const int64_t outputs = forward ? out : in;
    y_ = make_matrix(c.dtype, c.n, outputs, c.y_order, c.pad, c.offset);
    if (c.bias) {
      bias_ = make_array(c.dtype, {outputs});
      max_epilogue_ += fill(bias_, rng, c.integers);
    }
    if (c.residual) {
      residual_ = make_matrix(c.dtype, c.n, outputs, c.residual_order, c.pad, c.offset);
      max_epilogue_ += fill(residual_, rng, c.integers);
    }
  }
}

Status LinearData::refill(uint64_t seed) {
  Random rng(seed);
  expected_.reset();
  for (auto* list : {&x_, &dy_}) {
    double& largest = list == &x_ ? max_x_ : max_dy_;
    for (Buffer& b : *list) {
      largest = std::max(largest, fill(b, rng, case_.integers));
      if (b.device == nullptr) continue;
      BS_RETURN_IF_ERROR(cuda::copy_to_device(case_.device, b.device.get(), b.bytes.data(), b.bytes.size()));
    }
  }
  return {};
}

void LinearData::run_reference() {
  auto view = [](const Buffer& b) { return b.tensor.given() ? flatten(b.tensor) : Activations{}; };
  const Buffer w = w_.wide(), gates = gates_.wide();
  LayoutView plain = layout_;
  plain.transposed = false;
  if (case_.pass != Pass::wgrad) {
    const Buffer x = x_[0].wide(), bias = bias_.wide(), residual = residual_.wide();
    expected_ = make_matrix(DType::f64, y_.tensor.shape[0], y_.tensor.shape[1], Order::features_last, 0, 0);
    reference_product({.dtype = DType::f64,
                       .layout = plain,
                       .by_in = layout_.transposed() != (case_.pass == Pass::dgrad),
                       .x = view(x),
                       .y = flatten(expected_->tensor),
                       .residual = view(residual),
                       .w = w.tensor.data,
                       .gates = gates.tensor.data,
                       .bias = bias.tensor.data,
                       .activation = case_.activation});
    return;
  }
  std::vector<Buffer> held;
  std::vector<GradPair> pairs;
  for (size_t i = 0; i < x_.size(); ++i) {
    held.push_back(x_[i].wide());
    held.push_back(dy_[i].wide());
    pairs.push_back({held[2 * i].tensor, held[2 * i + 1].tensor});
  }
  expected_ = before_.wide();
  if (case_.dgates) expected_gates_ = gates_before_.wide();
  reference_weight_gradient({.dtype = DType::f64,
                             .dw_dtype = DType::f64,
                             .layout = plain,
                             .pairs = pairs,
                             .w = w.tensor.data,
                             .gates = gates.tensor.data,
                             .dw = expected_->tensor.data,
                             .dgates = expected_gates_ ? expected_gates_->tensor.data : nullptr,
                             .accumulate = case_.accumulate,
                             .exchanged = layout_.transposed()});
}

LinearData::Error LinearData::compare() {
  if (!expected_) run_reference();
  // |out - expected| <= c eps (k + 1) max|x| max|w|, with k products in the sum, and the rounding of the result itself.
  const RowWalk rows = walk_of(layout_.view(), layout_.transposed() != (case_.pass == Pass::dgrad));
  int64_t longest = 0;
  for (const Split& s : rows.splits) longest = std::max<int64_t>(longest, s.slots);
  int64_t products = 0;
  for (const Piece& p : rows.pieces) products = std::max<int64_t>(products, p.last - p.first);
  products *= std::max<int64_t>(1, longest) * layout_.block_size();
  double scale = max_x_ * max_w_;
  if (case_.pass == Pass::wgrad) {
    products = case_.n * case_.pairs;
    scale = max_x_ * max_dy_;
  }
  const double gate_scale = case_.gates ? 6 : 1;
  auto compare_one = [&](const Tensor& got, const Tensor& expected, double bound, Error& error) {
    const Buffer wide = [&] {
      Buffer view;
      view.tensor = got;
      return view.wide();
    }();
    const auto* g = static_cast<const double*>(wide.tensor.data);
    const auto* e = static_cast<const double*>(expected.data);
    int64_t nonzero = 0;
    const int64_t count = count_of(expected);
    for (int64_t i = 0; i < count; ++i) {
      nonzero += e[i] != 0;
      const double allowed = case_.integers ? 0 : bound + 2 * epsilon(got.dtype) * std::abs(e[i]);
      const double difference = std::abs(g[i] - e[i]);
      const bool same = g[i] == e[i] || (std::isnan(g[i]) && std::isnan(e[i]));
      const double ratio = same ? 0 : difference / std::max(allowed, std::numeric_limits<double>::min());
      if (ratio <= error.worst && !std::isnan(ratio)) continue;
      error.worst = std::isnan(ratio) ? std::numeric_limits<double>::infinity() : ratio;
      error.absolute = difference;
      error.where = concat("element ", i, ": got ", g[i], ", expected ", e[i], ", allowed difference ", allowed);
    }
    error.nonzero = count == 0 ? 1 : static_cast<double>(nonzero) / static_cast<double>(count);
  };
  const double eps = epsilon(sum_dtype(case_.dtype));
  // Activations are right to 4 ulp of max(|z|, 1).
  const double activated = case_.activation > Activation::relu ? 8 * eps * (1 + max_epilogue_) : 0;
  const double bound = 2 * eps * (static_cast<double>(products + 1) * scale * gate_scale + max_epilogue_) + activated;
  Error error;
  compare_one(y_.tensor, expected_->tensor, bound, error);
  const double nonzero = error.nonzero;
  if (expected_gates_) {
    const double area = static_cast<double>(case_.block * case_.block);
    compare_one(dgates_.tensor, expected_gates_->tensor,
                2 * eps * (static_cast<double>(products) + area) * area * scale * max_w_, error);
  }
  error.nonzero = nonzero;
  return error;
}

double LinearData::flops() const {
  double tokens = 0;
  if (case_.pass == Pass::wgrad) {
    for (const Buffer& x : x_) tokens += static_cast<double>(x.tensor.shape[0]);
  } else {
    tokens = static_cast<double>(case_.n);
  }
  return 2 * tokens * static_cast<double>(layout_.blocks() * case_.block * case_.block);
}

double LinearData::bytes() const {
  double total = static_cast<double>(count_of(y_.tensor) * size_of(y_.tensor.dtype));
  if (case_.pass != Pass::wgrad) total += static_cast<double>(count_of(w_.tensor) * size_of(case_.dtype));
  for (const auto* list : {&x_, &dy_}) {
    for (const Buffer& b : *list) total += static_cast<double>(count_of(b.tensor) * size_of(case_.dtype));
  }
  return total;
}

}  // namespace blocksparse::linear
