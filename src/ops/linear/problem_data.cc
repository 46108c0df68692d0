// Makes the data of a linear problem, and compares results with the reference.
#include "ops/linear/problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "blocksparse/blocksparse.h"
#include "core/convert.h"
#include "core/random.h"
#include "core/text.h"
#include "cpu/isa.h"
#include "cuda/memory.h"
#include "gemm/cuda/wgmma/plan.h"
#include "gemm/reference.h"

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

Buffer make_array(DType dtype, std::initializer_list<int64_t> shape, int64_t offset = 0) {
  Buffer buffer;
  buffer.tensor = Tensor(nullptr, dtype, shape);
  int64_t elements = 1;
  for (int64_t dim : shape) elements *= dim;
  buffer.bytes.assign(static_cast<size_t>((elements + offset) * size_of(dtype) + 2 * kGuard), kPoison);
  buffer.tensor.data = buffer.bytes.data() + kGuard + offset * size_of(dtype);
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

// Fills with values that are exact in the buffer's dtype, and returns the largest magnitude. A normal number takes 50
// ns, so large tensors draw from a table.
double fill(const Buffer& buffer, Random& rng, bool integers) {
  constexpr int64_t kLarge = 1 << 20, kTable = 1 << 16;
  double largest = 0;
  std::vector<double> table(!integers && count_of(buffer.tensor) > kLarge ? kTable : 0);
  for (double& value : table) value = normal(rng);
  for_each_element(buffer.tensor, [&](int64_t i) {
    const double value = integers         ? static_cast<double>(rng.below(5) - 2)
                         : !table.empty() ? table[rng.bits() % kTable]
                                          : normal(rng);
    store_element(buffer.tensor.data, i, buffer.tensor.dtype, value);
    largest = std::max(largest, std::abs(load_element(buffer.tensor.data, i, buffer.tensor.dtype)));
  });
  return largest;
}

// The part of a block that lies beyond the matrix must not matter: it becomes NaN.
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

// Takes out the row and column that shall be empty, and adds all blocks of those that shall be full.
BlockCoordinates with_rows_of(BlockCoordinates all, const LinearCase& c) {
  BlockCoordinates kept{all.out_blocks, all.in_blocks, {}, {}};
  const auto keep = [&kept](int64_t out, int64_t in) {
    kept.out.push_back(out);
    kept.in.push_back(in);
  };
  for (size_t i = 0; i < all.out.size(); ++i) {
    const int64_t out = all.out[i], in = all.in[i];
    if (out != c.empty_row && in != c.empty_col && out != c.full_row && in != c.full_col) keep(out, in);
  }
  for (int64_t in = 0; c.full_row >= 0 && in < all.in_blocks; ++in) keep(c.full_row, in);
  for (int64_t out = 0; c.full_col >= 0 && out < all.out_blocks; ++out) {
    if (out != c.full_row) keep(out, c.full_col);
  }
  return kept;
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

Result<Layout> layout_of(const LinearCase& c) {
  auto coordinates = graphs::by_name(c.graph, c.seed);
  if (!coordinates.ok()) return coordinates.status();
  auto layout = Layout::from_coordinates(
      with_rows_of(*std::move(coordinates), c),
      {.block_size = static_cast<int32_t>(c.block), .out_features = c.out_features, .in_features = c.in_features});
  if (layout.ok() && c.stack != 1) layout = layout->stack(c.stack);
  if (!layout.ok()) return layout.status();
  return c.transposed ? layout->t() : *layout;
}

Result<LinearData> LinearData::make(const LinearCase& c) {
  if (c.device.type == DeviceType::cuda) BS_RETURN_IF_ERROR(cuda_status());
  auto layout = layout_of(c);
  if (!layout.ok()) return layout.status();
  LinearData data(c, *std::move(layout));
  data.view_ = data.layout_;
  data.make_data();
  data.view_.device = c.device;  // the workspace is that of the card
  data.workspace_.assign(data.workspace_size() + static_cast<size_t>(kGuard), kPoison);
  if (c.device.type == DeviceType::cuda) BS_RETURN_IF_ERROR(data.move_to_device());
  return data;
}

void LinearData::make_data() {
  const LinearCase& c = case_;
  Random rng(static_cast<uint64_t>(c.seed) + 1);
  const int64_t b = layout_.block_size(), in = layout_.in_features(), out = layout_.out_features();
  const DType sums = sum_dtype(c.dtype);
  w_ = make_array(c.dtype, {layout_.blocks(), b, b}, c.w_offset);
  max_w_ = fill(w_, rng, c.integers);
  poison_beyond(w_, layout_);
  if (c.gates) {
    gates_ = make_array(sums, {layout_.blocks()});
    fill(gates_, rng, c.integers);
    for (int64_t i = 0; i < layout_.blocks(); i += 3) store_element(gates_.tensor.data, i, sums, 0);
  }
  if (c.pass == Pass::wgrad) {
    for (int64_t i = 0; i < c.pairs; ++i) {
      const int64_t n = i == 1 ? c.n / 2 : c.n;  // pairs differ in length
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
    y_ = make_matrix(c.dtype, c.n, c.hidden > 0 ? c.hidden : outputs, c.y_order, c.pad, c.offset);
    if (c.bias) {
      bias_ = make_array(c.dtype, {outputs});
      max_epilogue_ += fill(bias_, rng, c.integers);
    }
    if (c.residual) {
      residual_ =
          make_matrix(c.dtype, c.n, outputs, c.residual_order, c.residual_pad < 0 ? c.pad : c.residual_pad, c.offset);
      max_epilogue_ += fill(residual_, rng, c.integers);
    }
  }
  if (c.odd > 0) make_odd(rng);
}

// Makes elements that must not reach outputs without a block for them, nor pass a gate of 0.
void LinearData::make_odd(Random& rng) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double odd[] = {kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()};
  for (auto* list : {&x_, &dy_}) {
    for (Buffer& b : *list) {
      const Tensor& t = b.tensor;
      for (int64_t i = 0; i < case_.odd && t.shape[0] * t.shape[1] > 0; ++i) {
        const int64_t at = rng.below(t.shape[0]) * t.stride[0] + rng.below(t.shape[1]) * t.stride[1];
        store_element(t.data, at, t.dtype, odd[rng.below(3)]);
      }
    }
  }
  const int64_t area = layout_.block_size() * layout_.block_size();
  for (int64_t block = 0; case_.gates && block < layout_.blocks(); ++block) {
    if (load_element(gates_.tensor.data, block, gates_.tensor.dtype) != 0) continue;
    for (int64_t i = 0; i < area; ++i) store_element(w_.tensor.data, block * area + i, w_.tensor.dtype, odd[2]);
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

// The call on the host's data, as it is.
Product LinearData::host_product() const {
  auto view = [](const Buffer& b) { return b.tensor.given() ? flatten(b.tensor) : Activations{}; };
  return {.dtype = case_.dtype,
          .layout = plain_layout(),
          .by_in = layout_.transposed() != (case_.pass == Pass::dgrad),
          .x = view(x_[0]),
          .y = view(y_),
          .residual = view(residual_),
          .w = w_.tensor.data,
          .gates = gates_.tensor.data,
          .bias = bias_.tensor.data,
          .activation = case_.activation,
          .glu = case_.hidden > 0};
}

std::vector<GradPair> LinearData::host_pairs() const {
  std::vector<GradPair> pairs;
  pairs.reserve(dy_.size());
  for (size_t i = 0; i < dy_.size(); ++i) pairs.push_back({x_[i].tensor, dy_[i].tensor});
  return pairs;
}

WeightGradient LinearData::host_gradient(const std::vector<GradPair>& pairs) const {
  return {.dtype = case_.dtype,
          .dw_dtype = y_.tensor.dtype,
          .layout = plain_layout(),
          .pairs = pairs,
          .w = w_.tensor.data,
          .gates = gates_.tensor.data,
          .dw = y_.tensor.data,
          .dgates = dgates_.tensor.data,
          .accumulate = case_.accumulate,
          .exchanged = layout_.transposed()};
}

LayoutView LinearData::plain_layout() const {
  LayoutView plain = layout_;
  plain.transposed = false;
  return plain;
}

void LinearData::run_reference() {
  auto view = [](const Buffer& b) { return b.tensor.given() ? flatten(b.tensor) : Activations{}; };
  const Buffer w = w_.wide(), gates = gates_.wide();
  if (case_.pass != Pass::wgrad) {
    const Buffer x = x_[0].wide(), bias = bias_.wide(), residual = residual_.wide();
    expected_ = make_matrix(DType::f64, y_.tensor.shape[0], y_.tensor.shape[1], Order::features_last, 0, 0);
    Product p = host_product();
    p.dtype = DType::f64;
    p.x = view(x);
    p.y = flatten(expected_->tensor);
    p.residual = view(residual);
    p.w = w.tensor.data;
    p.gates = gates.tensor.data;
    p.bias = bias.tensor.data;
    reference_product(p);
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
                             .layout = plain_layout(),
                             .pairs = pairs,
                             .w = w.tensor.data,
                             .gates = gates.tensor.data,
                             .dw = expected_->tensor.data,
                             .dgates = expected_gates_ ? expected_gates_->tensor.data : nullptr,
                             .accumulate = case_.accumulate,
                             .exchanged = layout_.transposed()});
}

// The bound is |out - expected| <= c eps (k + 1) max|x| max|w|, where the sum has k products. The rounding of the
// result comes on top.
LinearData::Bounds LinearData::bounds() const {
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
  const double gate_scale = case_.gates ? 6 : 1, area = static_cast<double>(case_.block * case_.block);
  const double eps = epsilon(sum_dtype(case_.dtype)), k = static_cast<double>(products);
  const bool tf32 = case_.tf32 && case_.dtype == DType::f32 && case_.device.type == DeviceType::cuda;
  const double product_eps = tf32 ? 0x1.8p-11 : sum_epsilon(case_.dtype, case_.device);  // 11 bits of each operand
  // Activation functions are right to 4 ulp of max(|z|, 1).
  const double activated = case_.activation > Activation::relu ? 8 * eps * (1 + max_epilogue_) : 0;
  // On a card W is rounded once more after its gates: 6 sigma of that, for as many errors as there are products.
  const bool rounds = case_.gates && case_.pass != Pass::wgrad && case_.device.type == DeviceType::cuda &&
                      size_of(case_.dtype) == 2 && case_.n >= wgmma::kLeastTokens;
  const double gated = rounds ? 6 * std::sqrt(k) * epsilon(case_.dtype) * scale * gate_scale : 0;
  const double sum = 2 * product_eps * (k + 1) * scale * gate_scale + 2 * eps * max_epilogue_ + activated + gated;
  // f(gate) * up: the error of each factor times the other one, which is within 8 sigma. f' is below 1.2.
  const double other = 8 * std::sqrt(k) * gate_scale + max_epilogue_;
  const double rounded = fuses_glu(view_, case_.dtype, case_.n, case_.device) ? 0 : 2.4 * epsilon(case_.dtype);
  return {case_.hidden > 0 ? 2.2 * sum * other + rounded * other : sum,
          2 * product_eps * (k + area) * area * scale * max_w_};
}

void LinearData::check(double got, double expected, double bound, DType dtype, int64_t at, Error& error) const {
  // Sums of integers are exact. Products of two of them are where they have few enough digits.
  const double rounding = case_.integers ? (case_.hidden > 0 ? 2 : 0) : (case_.hidden > 0 ? 6 : 2);
  const double allowed = (case_.integers ? 0 : bound) + rounding * epsilon(dtype) * std::abs(expected);
  note_error(got, expected, allowed, at, error);
}

LinearData::Error LinearData::compare() {
  if (!expected_) run_reference();
  Error error;
  // The share of results that are not 0 is returned.
  const auto compare_all = [&](const Buffer& got, const Tensor& expected, double bound) {
    const Buffer wide = got.wide();
    const auto* g = static_cast<const double*>(wide.tensor.data);
    const auto* e = static_cast<const double*>(expected.data);
    const int64_t count = count_of(expected);
    int64_t nonzero = 0;
    for (int64_t i = 0; i < count; ++i) {
      nonzero += e[i] != 0;
      check(g[i], e[i], bound, got.tensor.dtype, i, error);
    }
    return count == 0 ? 1 : static_cast<double>(nonzero) / static_cast<double>(count);
  };
  const Bounds bound = bounds();
  error.nonzero = compare_all(y_, expected_->tensor, bound.output);
  if (expected_gates_) compare_all(dgates_, expected_gates_->tensor, bound.gates);
  return error;
}

LinearData::Error LinearData::spot_check(int64_t count) {
  Error error;
  Random rng(1);
  const double bound = bounds().output;
  const Tensor& y = y_.tensor;
  int64_t nonzero = 0;
  const std::vector<GradPair> pairs = host_pairs();
  const WeightGradient g = host_gradient(pairs);
  for (int64_t i = 0; i < count && count_of(y) > 0; ++i) {
    const int64_t row = rng.below(y.shape[0]), column = rng.below(y.shape[1]);
    int64_t at = row * y.stride[0] + column * y.stride[1];
    double expected = 0;
    if (case_.pass == Pass::wgrad) {
      const int64_t inner = rng.below(y.shape[2]);
      at += inner;
      const double gate = case_.gates ? load_element(gates_.tensor.data, row, gates_.tensor.dtype) : 1;
      expected = gate == 0 ? 0 : gate * reference_gradient_at(g, row, column, inner).value_or(0);
      if (case_.accumulate) expected += load_element(before_.tensor.data, at, y.dtype);
    } else {
      expected = reference_product_at(host_product(), row, column);
    }
    nonzero += expected != 0;
    check(load_element(y.data, at, y.dtype), expected, bound, y.dtype, at, error);
  }
  error.nonzero = count == 0 ? 1 : static_cast<double>(nonzero) / static_cast<double>(count);
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
